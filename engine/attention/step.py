"""What a forward pass hands to every layer's attention, and the function transformers calls with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from turnout.errors import Code, TurnoutError

NAME = "turnout_paged"
# What attention modules pass on in addition to the arguments below, and what the step knows or does not need.
WITHOUT_EFFECT = frozenset({"dropout", "position_ids", "use_cache", "output_attentions", "cache_position"})


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer turns products into weights: scale, optional sliding window (positions), optional soft cap."""

    scaling: float
    window: int | None = None
    softcap: float | None = None


class UnknownAttentionError(TurnoutError):
    """Attention of a kind that a step does not compute.

    Args:
        module: the attention module.
        reason: what is not known.
    """

    def __init__(self, module: nn.Module, reason: str) -> None:
        kind = getattr(getattr(module, "config", None), "model_type", type(module).__name__)
        super().__init__(Code.INVALID_ARGUMENT, f"architecture {kind!r} is not supported: {reason}", "model")
        self.reason = reason


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
    turnout_step: AttentionStep | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a ragged batch laid out in one row, as transformers calls it (registered under `NAME`).

    Args:
        module: the attention module; its `layer_idx` says which layer's KV.
        query: [1, heads, T, head_dim], rotated already.
        key: [1, kv_heads, T, head_dim].
        value: [1, kv_heads, T, head_dim].
        attention_mask: unused; masks come from the step.
        scaling: factor on the scores.
        turnout_step: the batch and the cache; decoder layers hand it through untouched, and must.
        sliding_window: a token sees only that many positions, its own included.
        softcap: soft cap on the scores (Gemma 2).
        rest: other arguments; only those in `WITHOUT_EFFECT` may say anything.

    Returns:
        [1, T, heads, head_dim] and None.

    Raises:
        UnknownAttentionError: it is of a kind that is not known.
    """
    for name, given in rest.items():
        if given is not None and name not in WITHOUT_EFFECT:
            raise UnknownAttentionError(module, f"attention argument {name!r} is not known")
    if key.shape != value.shape:
        raise UnknownAttentionError(module, f"keys of width {key.shape[-1]} have values of width {value.shape[-1]}")
    if turnout_step is None:
        raise UnknownAttentionError(module, "its layers do not hand arguments on to transformers' attention interface")
    layer = module.layer_idx
    assert isinstance(layer, int)
    pairs = torch.stack((key[0].transpose(0, 1), value[0].transpose(0, 1)), dim=1)
    scores = Scores(scaling, sliding_window, softcap)
    return turnout_step.attend(layer, query[0].transpose(0, 1), pairs, scores)[None], None
