"""A tiny pair of models on disk, and the comparison run on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.speculation.grid import Axes, Setting
from training.random_models import byte_tokenizer, llama_config, random_model


def checkpoint(folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """A checkpoint with random, peaked weights; equal seeds give equal models."""
    settings = {"hidden_size": 32, "intermediate_size": 48, **overrides}
    random_model(llama_config(**settings), seed, spread=0.3).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def setting(folder: Path, draft_seed: int = 0, **changes: Any) -> Setting:
    """Two tiny models in float32; the same weights twice unless the draft's seed says otherwise."""
    target = checkpoint(folder / "target")
    draft = checkpoint(folder / "draft", draft_seed)
    values: dict[str, Any] = {"dtype": "float32", "prompts": 3, "max_tokens": 10, "threads": 1, "turns": 1, **changes}
    return Setting(str(target), str(draft), **values)


def axes(*methods: str, **changes: Any) -> Axes:
    """Short axes: one kind of text, greedily, one prompt at a time."""
    values: dict[str, Any] = {"groups": ("arithmetic",), "temperatures": (0.0,), "batches": (1,), "peers": False}
    return Axes(methods, **{**values, **changes})
