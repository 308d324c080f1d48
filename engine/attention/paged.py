"""The attention function the models call: writes new keys and values, attends over the pool's slots.

Registered with transformers' `AttentionInterface` under `NAME`; the batch comes in as the keyword argument
`turnout_step`, which decoder layers hand through untouched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from engine.attention.batch import AttentionBatch, SingleRows, Span
from engine.cache.store import KVStore

NAME = "turnout_paged"


@dataclass(slots=True)
class AttentionStep:
    """What one forward hands to every layer's attention."""

    batch: AttentionBatch
    store: KVStore


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
    """Attention of a ragged batch laid out in one row, as transformers calls it.

    Args:
        module: the attention module; its `layer_idx` says which layer's KV.
        query: [1, heads, T, head_dim], rotated already.
        key: [1, kv_heads, T, head_dim].
        value: [1, kv_heads, T, head_dim].
        attention_mask: unused; masks come from the step.
        scaling: factor on the scores.
        turnout_step: the batch and the cache.
        sliding_window: a token sees only that many positions, its own included.
        softcap: soft cap on the scores (Gemma 2).

    Returns:
        [1, T, heads, head_dim] and None.
    """
    layer = module.layer_idx
    assert isinstance(layer, int)
    pairs = torch.stack((key[0].transpose(0, 1), value[0].transpose(0, 1)), dim=1)
    scores = Scores(scaling, sliding_window, softcap)
    return attend(turnout_step, layer, query[0].transpose(0, 1), pairs, scores)[None], None


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer turns products into weights: scale, optional sliding window (positions), optional soft cap."""

    scaling: float
    window: int | None = None
    softcap: float | None = None


def attend(step: AttentionStep, layer: int, query: torch.Tensor, pairs: torch.Tensor, scores: Scores) -> torch.Tensor:
    """Write new keys and values, then attend over each row's own slots.

    Args:
        step: the batch and the cache.
        layer: which layer's cache.
        query: [T, heads, head_dim].
        pairs: [T, 2, kv_heads, head_dim], keys and values.
        scores: scale, window, soft cap.

    Returns:
        [T, heads, head_dim].
    """
    cache, batch = step.store.layers[layer], step.batch
    cache.index_copy_(0, batch.slots, pairs)
    if len(batch.singles) == 1 and batch.singles[0].rows is None:
        return _singles(batch.singles[0], query, cache, scores, batch.block_size)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for group in batch.singles:
        assert group.rows is not None
        out[group.rows] = _singles(group, query.index_select(0, group.rows), cache, scores, batch.block_size)
    for span in batch.spans:
        rows = slice(span.start, span.start + span.count)
        out[rows] = _span(span, query[rows], cache, scores, batch.block_size)
    return out


def _singles(
    group: SingleRows, query: torch.Tensor, cache: torch.Tensor, scores: Scores, block_size: int
) -> torch.Tensor:
    """query [B, heads, dim] -> [B, heads, dim]. The query heads of one KV head become rows of one small matrix."""
    batch, heads, dim = query.shape
    kv_heads = cache.shape[2]
    if group.first_slot is not None:
        width = group.max_length
        pairs = cache[group.first_slot : group.first_slot + width][None]
    else:
        width = group.num_blocks * block_size
        pairs = _gather(cache, group.blocks, block_size).view(batch, width, 2, kv_heads, dim)
    key, value = pairs.permute(2, 0, 3, 1, 4).unbind(0)
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, dim)
    mask = group.mask(scores.window, width, query.dtype)
    return _attend(grouped, key, value, mask, False, scores).reshape(batch, heads, dim)


def _span(span: Span, query: torch.Tensor, cache: torch.Tensor, scores: Scores, block_size: int) -> torch.Tensor:
    """query [count, heads, dim] -> [count, heads, dim]."""
    if span.blocks is None:
        pairs = cache[span.first_slot : span.first_slot + span.length]
    else:
        pairs = _gather(cache, span.blocks, block_size)[: span.length]
    key, value = pairs.permute(1, 2, 0, 3).unbind(0)
    groups = query.shape[1] // key.shape[0]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    mask = span.mask(scores.window, query.dtype)
    out = _attend(query.transpose(0, 1)[None], key[None], value[None], mask, mask is None, scores)
    return out[0].transpose(0, 1)


def _gather(cache: torch.Tensor, blocks: torch.Tensor, block_size: int) -> torch.Tensor:
    """Blocks -> [len(blocks) * block_size, 2, kv_heads, dim]."""
    _, _, kv_heads, dim = cache.shape
    rows = cache.view(-1, block_size * 2 * kv_heads * dim).index_select(0, blocks)
    return rows.view(-1, 2, kv_heads, dim)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    how: Scores,
) -> torch.Tensor:
    """[B, H, n, dim] over [B, H, L, dim] -> [B, H, n, dim]."""
    if how.softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, scale=how.scaling)
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * how.scaling
    scores = torch.tanh(scores / how.softcap) * how.softcap
    if mask is not None:
        scores = scores + mask
    elif causal:
        count = scores.shape[-1]
        hidden = torch.ones(count, count, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.matmul(scores.softmax(-1).to(value.dtype), value)
