"""GPT-2: learned absolute positions, layer norms, queries, keys and values in one projection."""

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.architectures.base import Architecture, Halves


def linear(layer: Any) -> None:
    """Put ordinary linear layers in place of its transposed ones, so that the kernels take them."""
    for parent in list(layer.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Conv1D):
                with torch.device("meta"):
                    made = nn.Linear(child.nx, child.nf)
                made.weight = nn.Parameter(child.weight.detach().T.contiguous(), requires_grad=False)
                made.bias = nn.Parameter(child.bias.detach(), requires_grad=False)
                setattr(parent, name, made)


ARCHITECTURE = Architecture(
    title="GPT-2",
    norms=("ln_f",),
    layers="h",
    positions="wpe",
    adapt=linear,
    halves=Halves(attention="attn", output="c_proj", before_attention="ln_1", before_mlp="ln_2"),
    splits=False,
    has_queries=False,
    rotates=lambda config: (),
    unfit=lambda config: "cross-attention is not supported" if config.add_cross_attention else None,
    tiny={"": {"num_key_value_heads": None, "intermediate_size": None, "scale_attn_by_inverse_layer_idx": True}},
)
