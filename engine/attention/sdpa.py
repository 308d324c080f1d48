"""Attention over the block pool through torch's scaled dot-product attention: runs everywhere, the reference for all.

Rows of one token are computed together, padded to similar widths; prompt chunks and trees one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.layout import Int32, Layout
from engine.attention.step import Scores
from engine.cache.paged_kv import PagedKV

SCORE_BYTES = 64 << 20  # most memory of the scores of one piece of work
Bounds = tuple[int | None, int | None]  # window and chunk
SpanBounds = tuple[int | None, int | None, bool]  # the same, and `Scores.plain`


@dataclass(slots=True)
class _Singles:
    """Sequences that feed one token each, padded to the longest of them.

    `first_slot` is where the only sequence's keys start, when there is one and its blocks follow each other. `padding`,
    int64 [n], are the keys of all rows that are not their sequence's own; None: there are none.
    """

    rows: torch.Tensor
    blocks: torch.Tensor
    lengths: torch.Tensor
    width: int
    longest: int
    first_slot: int | None
    padding: torch.Tensor | None
    masks: dict[Bounds, torch.Tensor | None] = field(default_factory=dict)

    def mask(self, scores: Scores, width: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask [B, 1, 1, width], made once per step; None when every row sees everything."""
        bounds = (scores.window, scores.chunk)
        if bounds not in self.masks:
            self.masks[bounds] = self._build(scores, width, dtype)
        return self.masks[bounds]

    def _build(self, scores: Scores, width: int, dtype: torch.dtype) -> torch.Tensor | None:
        if self.first_slot is not None and not scores.cut(self.longest):
            return None
        column = torch.arange(width, device=self.lengths.device)
        seen = column < self.lengths[:, None]
        first = scores.first_seen(self.lengths[:, None] - 1)
        if first is not None:
            seen &= column >= first
        return _additive(seen, dtype)[:, None, None, :]


@dataclass(slots=True)
class _Span:
    """A sequence that feeds several tokens: a prompt chunk, a catch-up, a draft tree.

    `blocks` is None when its keys lie together from `first_slot` on.
    """

    start: int
    count: int
    length: int
    blocks: torch.Tensor | None
    first_slot: int
    places: torch.Tensor
    tree: torch.Tensor | None
    masks: dict[SpanBounds, torch.Tensor | None] = field(default_factory=dict)

    def mask(self, scores: Scores, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask [count, length], made once per step; None when `is_causal` of torch's attention says it all."""
        bounds = (scores.window, scores.chunk, scores.plain)
        if bounds not in self.masks:
            self.masks[bounds] = self._build(scores, dtype)
        return self.masks[bounds]

    def _build(self, scores: Scores, dtype: torch.dtype) -> torch.Tensor | None:
        whole = self.tree is None and self.length == self.count
        if whole and scores.plain and not scores.cut(self.length):
            return None
        device = self.places.device
        seen = tree_mask(self.count, self.length, self.tree).to(device)
        first = scores.first_seen(self.places[:, None])
        if first is not None:
            keys = torch.cat([torch.arange(self.length - self.count, device=device), self.places])
            seen &= keys[None, :] >= first
        return _additive(seen, dtype)


class SdpaStep:
    """One forward's attention.

    Args:
        layout: the batch.
        store: the cache; its device is where everything is computed.
    """

    def __init__(self, layout: Layout, store: PagedKV) -> None:
        device = store.device
        self._store = store
        self._block_size = layout.block_size
        self._slots = torch.from_numpy(layout.slots).to(device)
        places = torch.from_numpy(layout.places).to(device)
        counts = layout.counts
        spans = [b for b, count in enumerate(counts.tolist()) if count > 1 or b in layout.trees]
        self._spans = [_span(layout, b, places, device) for b in spans]
        self._singles = [_single_rows(layout, group, device) for group in _by_width(layout)]
        self._uniform = len(self._singles) == 1 and not self._spans

    def attend(self, layer: int, query: torch.Tensor, pairs: torch.Tensor, scores: Scores) -> torch.Tensor:
        """See `engine.attention.step.AttentionStep.attend`."""
        self._store.write(layer, self._slots, pairs)
        if self._uniform:
            return self._attend_singles(self._singles[0], layer, query, scores)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in self._singles:
            out[group.rows] = self._attend_singles(group, layer, query.index_select(0, group.rows), scores)
        for span in self._spans:
            rows = slice(span.start, span.start + span.count)
            out[rows] = self._attend_span(span, layer, query[rows], scores)
        return out

    def _attend_singles(self, group: _Singles, layer: int, query: torch.Tensor, scores: Scores) -> torch.Tensor:
        """query [B, heads, dim] -> same. The query heads of one KV head become rows of one small matrix."""
        batch, heads, dim = query.shape
        kv_heads = self._store.layers[layer].shape[2]
        if group.first_slot is not None:
            width = group.longest
            pairs = self._store.span(layer, group.first_slot, width)[None]
        else:
            width = group.width * self._block_size
            pairs = self._store.gather(layer, group.blocks, self._block_size)
            if group.padding is not None:  # anything may be there, and NaN times a weight of 0 is NaN
                pairs.index_fill_(0, group.padding, 0.0)
            pairs = pairs.view(batch, width, 2, kv_heads, dim)
        key, value = pairs.permute(2, 0, 3, 1, 4).unbind(0)
        grouped = query.reshape(batch, kv_heads, heads // kv_heads, dim)
        mask = group.mask(scores, width, query.dtype)
        sinks = None if scores.sinks is None else scores.sinks.view(1, kv_heads, -1, 1)
        return _attend(grouped, key, value, mask, False, scores, sinks).reshape(batch, heads, dim)

    def _attend_span(self, span: _Span, layer: int, query: torch.Tensor, scores: Scores) -> torch.Tensor:
        """query [count, heads, dim] -> same."""
        if span.blocks is None:
            pairs = self._store.span(layer, span.first_slot, span.length)
        else:
            pairs = self._store.gather(layer, span.blocks, self._block_size)[: span.length]
        key, value = pairs.permute(1, 2, 0, 3).unbind(0)
        groups = query.shape[1] // key.shape[0]
        if groups > 1:
            key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
        mask = span.mask(scores, query.dtype)
        sinks = None if scores.sinks is None else scores.sinks.view(1, -1, 1, 1)
        out = _attend(query.transpose(0, 1)[None], key[None], value[None], mask, mask is None, scores, sinks)
        return out[0].transpose(0, 1)


def _single_rows(layout: Layout, group: list[int], device: torch.device) -> _Singles:
    lengths = layout.lengths[group]
    width = int(-(-lengths.max() // layout.block_size))
    blocks = layout.blocks[group, :width]
    rows = torch.from_numpy(layout.starts[group].astype(np.int64)).to(device)
    padding = np.flatnonzero(np.arange(width * layout.block_size) >= lengths[:, None])
    return _Singles(
        rows=rows,
        blocks=torch.from_numpy(blocks.astype(np.int64).reshape(-1)).to(device),
        lengths=torch.from_numpy(lengths.astype(np.int64)).to(device),
        width=width,
        longest=int(lengths.max()),
        first_slot=_first_slot(blocks[0], layout.block_size) if len(group) == 1 else None,
        padding=torch.from_numpy(padding).to(device) if len(padding) else None,
    )


def _span(layout: Layout, sequence: int, places: torch.Tensor, device: torch.device) -> _Span:
    start, end = int(layout.starts[sequence]), int(layout.starts[sequence + 1])
    length = int(layout.lengths[sequence])
    blocks = layout.blocks[sequence, : -(-length // layout.block_size)]
    first = _first_slot(blocks, layout.block_size)
    tree = layout.trees.get(sequence)
    return _Span(
        start=start,
        count=end - start,
        length=length,
        blocks=None if first is not None else torch.from_numpy(blocks.astype(np.int64)).to(device),
        first_slot=first or 0,
        places=places[start:end],
        tree=None if tree is None else tree.to(device),
    )


def _by_width(layout: Layout) -> list[list[int]]:
    """Sequences of one token, grouped so that padding at most doubles a row: by the power of two above their blocks."""
    groups: dict[int, list[int]] = {}
    for sequence in np.flatnonzero(layout.counts == 1).tolist():
        if sequence in layout.trees:
            continue
        blocks = -(-int(layout.lengths[sequence]) // layout.block_size)
        groups.setdefault(blocks.bit_length(), []).append(sequence)
    return list(groups.values())


def _first_slot(blocks: Int32, block_size: int) -> int | None:
    """The first slot when the blocks follow each other in memory."""
    if len(blocks) > 1 and (np.diff(blocks) != 1).any():
        return None
    return int(blocks[0]) * block_size


def tree_mask(count: int, length: int, tree: torch.Tensor | None) -> torch.Tensor:
    """Which of `length` keys, their own the last, `count` rows see: bool [count, length]; see `Layout.trees`."""
    device = None if tree is None else tree.device
    seen = torch.ones(count, length, dtype=torch.bool, device=device).tril(length - count)
    if tree is not None:
        rows, nodes = tree.shape
        seen[-rows:, -nodes:] = tree
    return seen


def _additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where seen, -inf elsewhere."""
    shown = torch.zeros((), dtype=dtype, device=seen.device)
    return torch.where(seen, shown, torch.full_like(shown, float("-inf")))


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    how: Scores,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[B, H, n, dim] over [B, H, L, dim] -> [B, H, n, dim]; sinks [1, H, 1 or n, 1] are those of each row.

    `causal` counts where `how` is plain; other scores have a mask unless every row sees every key.
    """
    if how.plain:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, scale=how.scaling)
    rows, keys = query.shape[-2], key.shape[-2]
    most = max(SCORE_BYTES // (4 * query.shape[0] * query.shape[1] * keys), 1)
    pieces = []
    for start in range(0, rows, most):
        piece = slice(start, start + most)
        seen = mask if mask is None or mask.shape[-2] == 1 else mask[..., piece, :]
        sunk = sinks if sinks is None or sinks.shape[-2] == 1 else sinks[..., piece, :]
        pieces.append(_weigh(query[..., piece, :], key, value, seen, how, sunk))
    return torch.cat(pieces, dim=-2)


def _weigh(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    how: Scores,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend as `_attend` does, with what torch's own attention lacks: a soft cap, and sinks."""
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * how.scaling
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[-2]]
    return torch.matmul(weights.to(value.dtype), value)
