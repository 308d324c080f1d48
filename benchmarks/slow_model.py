"""A large model that costs more and says the same: layers are added that write nothing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def deepened(source: Path, folder: Path, extra: int) -> Path:
    """Write the deepened model to a folder, and give that back.

    Args:
        source: a checkpoint whose layers end in `self_attn.o_proj` and `mlp.down_proj`, as Llama's.
        folder: is made.
        extra: layers that are added.

    Raises:
        ValueError: `extra` is below 1.
    """
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", local_files_only=True)
    deepen(model, extra)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, local_files_only=True).save_pretrained(folder)
    return folder


@torch.no_grad()
def deepen(model: Any, extra: int) -> None:
    """Add layers behind the last one, in place: copies of the others, whose output projections are zero.

    Such a layer is computed whole, adds zero to the residual stream, and so leaves every logit as it is, to the bit.
    What was trained on the hidden state before the head fits as before.

    Raises:
        ValueError: `extra` is below 1.
    """
    if extra < 1:
        raise ValueError(f"extra must be at least 1, got {extra}")
    layers = model.model.layers
    before = len(layers)
    for place in range(before, before + extra):
        layer = copy.deepcopy(layers[place % before])
        layer.self_attn.layer_idx = place
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.zero_()
            if linear.bias is not None:
                linear.bias.zero_()
        layers.append(layer)
    model.config.num_hidden_layers = before + extra
