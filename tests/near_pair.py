"""A small random pair whose models often, not always, agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from training.random_models import byte_tokenizer, llama_config, random_model

WIDTH = 32
SHAPE: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 64}


def save_near_pair(folder: Path) -> None:
    """Write checkpoints `large` and `small`: the small one is the large one less a last layer that says little.

    Two ranks can share their heads.
    """
    large = random_model(llama_config(num_hidden_layers=4, **SHAPE), seed=2, spread=0.25)
    with torch.no_grad():
        large.model.layers[3].self_attn.o_proj.weight.mul_(0.2)
        large.model.layers[3].mlp.down_proj.weight.mul_(0.2)
        large.model.norm.weight.mul_(2.0)
    small = random_model(llama_config(num_hidden_layers=3, **SHAPE), seed=2)
    small.load_state_dict(large.state_dict(), strict=False)
    for name, model in (("small", small), ("large", large)):
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
