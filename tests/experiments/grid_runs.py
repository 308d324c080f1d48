"""Experiments on a tiny pair, and results made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from experiments.grid.cells import Cell, Facts, Record
from experiments.grid.spec import DatasetChoice, ExperimentSpec, LoadChoice, read_spec
from experiments.grid.store import Store
from tests.near_pair import save_near_pair

PROMPTS = ["one", "two and", "three or four", "five", "six", "seven eight"]


def pair_config(folder: Path, **settings: Any) -> Path:
    """A configuration of a tiny random pair in float32, with these settings of both models."""
    save_near_pair(folder)
    model = {"dtype": "float32", "kv_memory_bytes": 1 << 20, **settings}
    values = {
        "models": {role: {"path": str(folder / role), **model} for role in ("small", "large")},
        "pools": {"near": {"small": "small", "large": "large"}},
        "engine": {"threads": 1},
    }
    path = folder / "turnout.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def dataset(folder: Path, rows: list[dict[str, Any]] | None = None) -> Path:
    """A file of rows."""
    rows = rows or [{"id": f"p{n}", "prompt": text, "answer": "e"} for n, text in enumerate(PROMPTS)]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def spec(config: Path, folder: Path, **changes: Any) -> ExperimentSpec:
    """A small grid, read from its file, that runs in this process."""
    rows = {"path": str(folder / "rows.jsonl"), "chat": False, "scorer": {"kind": "regex", "pattern": "[aeiou]"}}
    values: dict[str, Any] = {
        "name": "small",
        "config": str(config),
        "methods": [{"name": "plain"}, {"name": "entropy_adaptive", "grid": {"threshold": [1.0, 3.0]}}],
        "datasets": [rows],
        "sampling": {"temperature": 0, "max_tokens": 8, "ignore_eos": True},
        "chunk": 2,
        "workers": 0,
        **changes,
    }
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return read_spec(path)


def made_cell(label: str, run: int = 0) -> Cell:
    """A cell whose results are made up; another run has another address."""
    data = DatasetChoice(path="made.jsonl", scorer={"kind": "exact"})  # type: ignore[arg-type]
    return Cell("pool", label, "plain", {"model": "large"}, data, LoadChoice(), depends={"run": f"{label} {run}"})


def save_made(store: Store, name: str, scores: dict[str, np.ndarray[Any, Any]], run: int, paper: Any = 8.0) -> None:
    """An experiment with these scores by label, prompts alike; `paper`: cost of each prompt, or of all."""
    labels = [{"name": "plain", "label": label} for label in scores]
    rows = {"path": "made.jsonl", "scorer": {"kind": "exact"}}
    made = ExperimentSpec.model_validate(
        {"name": name, "methods": labels, "datasets": [rows], "baseline": next(iter(scores))}
    )
    cells = [made_cell(label, run) for label in scores]
    for cell, values in zip(cells, scores.values(), strict=True):
        costs = np.broadcast_to(paper, values.shape)
        records = [
            Record(
                f"p{n}", float(v), "x", 8, 8, float(costs[n]), 80.0, 80.0, 0.1, 0.05, pieces=[("large", "decoded", "x")]
            )
            for n, v in enumerate(values)
        ]
        store.save_chunk(cell, 0, records, Facts())
        store.finish(cell, Facts(wall_s=1.0, machine={"processor": "made"}))
    store.save(made, cells, {})
