"""What a forward pass hands to every layer's attention, and the function transformers calls with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

NAME = "turnout_paged"


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer turns products into weights: scale, optional sliding window (positions), optional soft cap."""

    scaling: float
    window: int | None = None
    softcap: float | None = None


class AttentionStep(Protocol):
    """One forward's batch and cache, ready for every layer in turn."""

    def attend(self, layer: int, query: torch.Tensor, pairs: torch.Tensor, scores: Scores) -> torch.Tensor:
        """Write new keys and values, then attend over each row's own slots.

        Args:
            layer: which layer's cache.
            query: [T, heads, head_dim].
            pairs: [T, 2, kv_heads, head_dim], keys and values.
            scores: scale, window, soft cap.

        Returns:
            [T, heads, head_dim].
        """
        ...


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    turnout_step: AttentionStep,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a ragged batch laid out in one row, as transformers calls it (registered under `NAME`).

    Args:
        module: the attention module; its `layer_idx` says which layer's KV.
        query: [1, heads, T, head_dim], rotated already.
        key: [1, kv_heads, T, head_dim].
        value: [1, kv_heads, T, head_dim].
        attention_mask: unused; masks come from the step.
        scaling: factor on the scores.
        turnout_step: the batch and the cache; decoder layers hand it through untouched.
        sliding_window: a token sees only that many positions, its own included.
        softcap: soft cap on the scores (Gemma 2).

    Returns:
        [1, T, heads, head_dim] and None.
    """
    layer = module.layer_idx
    assert isinstance(layer, int)
    pairs = torch.stack((key[0].transpose(0, 1), value[0].transpose(0, 1)), dim=1)
    scores = Scores(scaling, sliding_window, softcap)
    return turnout_step.attend(layer, query[0].transpose(0, 1), pairs, scores)[None], None
