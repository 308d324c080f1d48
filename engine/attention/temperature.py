"""Attention temperature by position, in layers that do not rotate queries and keys (Llama 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Temperature:
    """The factor on the queries of one layer, which grows with their positions.

    Args:
        module: an attention module of transformers with `floor_scale` and `attn_scale`.
    """

    def __init__(self, module: Any) -> None:
        self._floor: float = module.floor_scale
        self._scale: float = module.attn_scale

    def scale(self, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Scale queries [T, heads, head_dim] at positions int64 [T]."""
        steps = torch.floor((positions.float() + 1.0) / self._floor)
        return (queries * (torch.log1p(steps) * self._scale + 1.0)[:, None, None]).to(queries.dtype)


def take_temperature(layer: nn.Module) -> None:
    """Scale the queries of a decoder layer by the positions of the batch, where its module would count rows instead.

    Args:
        layer: its attention is recognised by `attn_temperature_tuning`, and gets an attribute `turnout_temperature`.
    """
    module: Any
    for module in layer.modules():
        if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
            module.turnout_temperature = Temperature(module)
            module.attn_temperature_tuning = False
