"""A tiny target for drafts: two of its layers say much, two say little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from training.demo_prompts import Prompt
from training.draft.plan import DraftPlan
from training.head_runs import Questions, Target
from training.random_models import byte_tokenizer, llama_config, random_model
from turnout.config import EngineConfig, ModelConfig

WEAK = (1, 3)
ENGINE = EngineConfig(threads=1, kernels="torch")


def tiny_model(weak: float = 0.3) -> Any:
    """Four layers, of which `WEAK` add `weak` times what they would."""
    config = llama_config(num_hidden_layers=4, hidden_size=32, intermediate_size=64)
    model = random_model(config, seed=2, spread=0.25)
    with torch.no_grad():
        for layer in WEAK:
            model.model.layers[layer].self_attn.o_proj.weight.mul_(weak)
            model.model.layers[layer].mlp.down_proj.weight.mul_(weak)
        model.model.norm.weight.mul_(2.0)
    return model


def save_tiny(folder: Path, weak: float = 0.3) -> Path:
    """Write it as a checkpoint."""
    tiny_model(weak).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def load_tiny(folder: Path) -> Target:
    """Load it as `turnout train` does."""
    return Target.load(ModelConfig(path=str(folder), dtype="float32", kv_memory_bytes=4 << 20), ENGINE)


WORDS = "sum is why go at on we me no so up by do he it or"


def questions() -> Questions:
    """120 to train on, eight held out."""
    prompts = [Prompt(f"{word} {number}?") for word in WORDS.split() for number in range(8)]
    return Questions(prompts[8:], prompts[:8])


def tiny_plan(**changed: Any) -> DraftPlan:
    """Two layers, short answers, a few steps."""
    values = {"layers": 2, "steps": 40, "temperatures": (1.0,), "max_tokens": 16, "learning_rate": 1e-2}
    return DraftPlan(questions(), **{**values, **changed})
