"""A causal language model of transformers: what Hugging Face's own ways of generating run on."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load(folder: str | Path, dtype: str) -> Any:
    """Load a causal language model as transformers does; `dtype` names one of torch's."""
    import torch

    from engine.checkpoints import read_model

    model, _ = read_model(Path(folder), getattr(torch, dtype))
    return model.eval()
