"""What a forward pass hands to every layer's attention, and the function transformers calls with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from engine.attention.latent import Latent
from engine.attention.temperature import Temperature
from turnout.errors import Code, TurnoutError

NAME = "turnout_paged"
CHUNKED = "chunked_attention"
# What attention modules pass on in addition to the arguments below, and what the step knows or does not need.
WITHOUT_EFFECT = frozenset({"dropout", "position_ids", "use_cache", "output_attentions", "cache_position"})


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer turns products into weights.

    Attributes:
        scaling: factor on the products.
        window: a token sees only that many positions, its own included; None: all before it.
        chunk: positions are cut into chunks of that many, and a token sees those of its own before it (Llama 4).
        softcap: soft cap on the scores.
        sinks: [heads] a logit of each head that takes a share of the weights and gives no value (attention sinks).
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    chunk: int | None = None

    @property
    def plain(self) -> bool:
        """Whether torch's own attention computes the weights: it knows masks, but no soft cap and no sinks."""
        return self.softcap is None and self.sinks is None

    def cut(self, end: int) -> bool:
        """Whether a token of a position below `end` may not see all before it."""
        return any(each is not None and end > each for each in (self.window, self.chunk))

    def first_seen(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Return the first position that tokens of these positions see (int64, any shape); None: all see all."""
        if self.window is not None:
            return positions - self.window + 1
        return None if self.chunk is None else positions // self.chunk * self.chunk


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
            scores: scale, window, chunk, soft cap, sinks.

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
    turnout_positions: torch.Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a ragged batch laid out in one row, as transformers calls it (registered under `NAME`).

    Args:
        module: the attention module; its `layer_idx` says which layer's KV.
        query: [1, heads, T, head_dim], rotated already.
        key: [1, kv_heads, T, head_dim].
        value: [1, kv_heads, T, value_dim].
        attention_mask: unused; masks come from the step.
        scaling: factor on the scores.
        turnout_step: the batch and the cache; decoder layers hand it through untouched, and must.
        turnout_positions: int64 [T], likewise.
        sliding_window: a token sees only that many positions, its own included.
        softcap: soft cap on the scores (Gemma 2).
        s_aux: [heads] sinks (GPT-OSS).
        rest: other arguments; only those in `WITHOUT_EFFECT` may say anything.

    Returns:
        [1, T, heads, value_dim] and None.

    Raises:
        UnknownAttentionError: it is of a kind that is not known.
    """
    for name, given in rest.items():
        if given is not None and name not in WITHOUT_EFFECT:
            raise UnknownAttentionError(module, f"attention argument {name!r} is not known")
    if turnout_step is None:
        raise UnknownAttentionError(module, "its layers do not hand arguments on to transformers' attention interface")
    layer = module.layer_idx
    assert isinstance(layer, int)
    latent: Latent | None = getattr(module, "turnout_latent", None)
    temperature: Temperature | None = getattr(module, "turnout_temperature", None)
    queries, width = query[0].transpose(0, 1), max(key.shape[-1], value.shape[-1])
    if latent is not None:
        queries = latent.absorb(queries)
    if temperature is not None:
        assert turnout_positions is not None
        queries = temperature.scale(queries, turnout_positions)
    pairs = torch.stack([_widened(states[0].transpose(0, 1), width) for states in (key, value)], dim=1)
    scores = Scores(scaling, sliding_window, softcap, s_aux, _chunk_of(module))
    attended = turnout_step.attend(layer, _widened(queries, width), pairs, scores)[..., : value.shape[-1]]
    return (attended if latent is None else latent.expand(attended))[None], None


def _chunk_of(module: Any) -> int | None:
    """Return the chunk of a layer that has one; in transformers, masks hold it, and modules do not name it."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    return config.attention_chunk_size if kinds and kinds[module.layer_idx] == CHUNKED else None


def _widened(heads: torch.Tensor, width: int) -> torch.Tensor:
    """Pad heads [T, heads, at most width] to this width with zeros, which change no product."""
    return heads if heads.shape[-1] == width else F.pad(heads, (0, width - heads.shape[-1]))
