"""`turnout train uni_encoder`, `rank_gen` and `daemon`: trained on a file of passages, and used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from decoding.artifacts import Artifact
from tests.cli.test_train import config

__all__ = ["config"]


@pytest.mark.parametrize(
    ("kind", "more"), [("uni_encoder", ()), ("rank_gen", ()), ("daemon", ("--metric", "information"))]
)
def test_the_commands(run: Any, config: Path, kind: str, more: tuple[str, ...]) -> None:
    folder = config.parent
    lines = "".join(f"passage number {n} says {n * 7} and then {n * 3}\n" for n in range(20))
    (folder / "passages.txt").write_text(lines, encoding="utf-8")
    out = folder / "heads" / f"{kind}.safetensors"
    asked = ("--passages", str(folder / "passages.txt"), "--config", str(config), "--length", "6", "--json")
    few = () if kind == "daemon" else ("--epochs", "2")
    result = run("train", kind, "--out", str(out), *asked, *few, *more)
    assert result.code == 0, result.err
    assert json.loads(result.out) == json.loads(out.with_suffix(".report.json").read_text(encoding="utf-8"))
    assert Artifact.load(out).kind == kind
    params = ("--param", "k=2", "--param", f"rerank={kind}")
    shown = run(
        "generate", "ask", "--local", "--config", str(config), "--method", "best_of", *params, "--max-tokens", "4"
    )
    assert shown.code == 0, shown.err
    wrong = run("train", kind, "--out", str(out), *asked, "--length", "200")
    assert (wrong.code, "at least 16 must" in wrong.err) == (1, True)
