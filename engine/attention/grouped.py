"""Attention in torch operations that reads the prefixes of a batch once for all sequences below them.

Each part of a row's keys gives values weighted by its own softmax, and the logarithm of what the weights were divided
by; two such parts of the keys are joined exactly.

Source: paper #75, "Hydragen: High-Throughput LLM Inference with Shared Prefixes".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from engine.attention.layout import Layout, select
from engine.attention.prefixes import Prefixes
from engine.attention.sdpa import SCORE_BYTES, SdpaStep, tree_mask
from engine.attention.step import Scores
from engine.cache.paged_kv import PagedKV


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows that attend to the same number of keys: those of a prefix, or what sequences have after theirs.

    Attributes:
        rows: int64 [batch * fed] of the whole batch, those of a sequence together.
        blocks: int64 [batch * width] where the keys lie.
        batch: sequences, each with keys of its own; 1 for a prefix, whatever the number of sequences.
        keys: how many of the leading ones count, where `seen` does not say it.
        seen: bool [batch, fed, keys]; None: every row sees every key.
        padding: int64 [n] keys in the blocks of all that are not their sequence's own; None: there are none.
    """

    rows: torch.Tensor
    blocks: torch.Tensor
    batch: int
    keys: int
    seen: torch.Tensor | None = None
    padding: torch.Tensor | None = None


class Joined:
    """What is known of T rows after some parts of their keys.

    Args:
        query: [T, heads, dim], for its shape and device.
    """

    def __init__(self, query: torch.Tensor) -> None:
        self.values = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        self.weights = torch.full(query.shape[:2], float("-inf"), device=query.device)

    def join(self, rows: torch.Tensor, values: torch.Tensor, weights: torch.Tensor) -> None:
        """Take in another part of the keys.

        Args:
            rows: int64 [R].
            values: float32 [R, heads, dim], weighted by a softmax over that part alone.
            weights: float32 [R, heads], logarithm of the sum of the exponentials of its scores.
        """
        before = self.weights[rows]
        both = torch.logaddexp(before, weights)
        kept, taken = (before - both).exp()[..., None], (weights - both).exp()[..., None]
        self.values[rows] = self.values[rows] * kept + values * taken
        self.weights[rows] = both

    def weighed(self, sinks: torch.Tensor | None) -> torch.Tensor:
        """Return the values, float32 [T, heads, dim], of which sinks ([heads], as in `Scores`) took a share."""
        return self.values if sinks is None else self.values * (self.weights - sinks.float()).sigmoid()[..., None]


class GroupedStep:
    """One forward's attention; layers whose window or chunk may end inside a prefix attend as if nothing were shared.

    Args:
        layout: the batch.
        store: the cache; its device is where everything is computed.
        prefixes: what sequences of the batch have in common.
    """

    def __init__(self, layout: Layout, store: PagedKV, prefixes: Prefixes) -> None:
        self._layout = layout
        self._store = store
        self._slots = torch.from_numpy(layout.slots).to(store.device)
        self._positions_end = int(layout.positions.max()) + 1
        nodes = [_node(layout, prefixes, index, store.device) for index in range(len(prefixes.nodes))]
        self._parts = [*nodes, *_own_parts(layout, prefixes, store.device)]
        apart, rows = select(layout, np.flatnonzero(prefixes.leaves < 0))
        self._apart = None if not len(rows) else (SdpaStep(apart, store), torch.from_numpy(rows).to(store.device))

    @cached_property
    def _plain(self) -> SdpaStep:
        return SdpaStep(self._layout, self._store)

    def attend(self, layer: int, query: torch.Tensor, pairs: torch.Tensor, scores: Scores) -> torch.Tensor:
        """See `engine.attention.step.AttentionStep.attend`."""
        if scores.cut(self._positions_end):
            return self._plain.attend(layer, query, pairs, scores)
        store, size = self._store, self._layout.block_size
        store.write(layer, self._slots, pairs)
        joined = Joined(query)
        for part in self._parts:
            for piece in _pieces(part, query.shape[1]):
                keys_and_values = store.gather(layer, piece.blocks, size)
                if piece.padding is not None:
                    keys_and_values.index_fill_(0, piece.padding, 0.0)
                joined.join(piece.rows, *_attend(piece, query[piece.rows], keys_and_values, scores))
        out = joined.weighed(scores.sinks).to(query.dtype)
        if self._apart is not None:
            step, rows = self._apart
            out[rows] = step.attend(layer, query[rows], pairs[rows], scores)
        return out


def _node(layout: Layout, prefixes: Prefixes, index: int, device: torch.device) -> _Part:
    node, size = prefixes.nodes[index], layout.block_size
    rows = prefixes.rows[node["first"] : node["end"]].astype(np.int64)
    blocks = layout.blocks[node["sequence"], node["begin_key"] // size : node["end_key"] // size].astype(np.int64)
    return _Part(
        torch.from_numpy(rows).to(device), torch.from_numpy(blocks).to(device), 1, len(blocks) * layout.block_size
    )


def _own_parts(layout: Layout, prefixes: Prefixes, device: torch.device) -> list[_Part]:
    """What each sequence that shares has after its prefixes: single rows of similar width together, others alone."""
    ends = prefixes.nodes["end_key"][prefixes.leaves]
    parts, groups = [], dict[int, list[int]]()
    for sequence in np.flatnonzero(prefixes.leaves >= 0).tolist():
        if layout.counts[sequence] == 1 and sequence not in layout.trees:
            blocks = -(-int(layout.lengths[sequence] - ends[sequence]) // layout.block_size)
            groups.setdefault(blocks.bit_length(), []).append(sequence)
        else:
            parts.append(_span(layout, sequence, int(ends[sequence]), device))
    return [*parts, *(_singles(layout, group, ends[group], device) for group in groups.values())]


def _singles(layout: Layout, group: list[int], ends: np.ndarray, device: torch.device) -> _Part:
    size = layout.block_size
    keys = layout.lengths[group] - ends
    width = int(-(-keys.max() // size))
    columns = np.minimum(ends[:, None] // size + np.arange(width), layout.blocks.shape[1] - 1)
    blocks = np.take_along_axis(layout.blocks[group], columns, axis=1).astype(np.int64)
    own = np.arange(width * size) < keys[:, None]
    seen, padding = torch.from_numpy(own)[:, None], torch.from_numpy(np.flatnonzero(~own))
    rows = torch.from_numpy(layout.starts[group].astype(np.int64))
    flat = torch.from_numpy(blocks.reshape(-1))
    return _Part(rows.to(device), flat.to(device), len(group), width * size, seen.to(device), padding.to(device))


def _span(layout: Layout, sequence: int, end: int, device: torch.device) -> _Part:
    start, stop = int(layout.starts[sequence]), int(layout.starts[sequence + 1])
    keys, size = int(layout.lengths[sequence]) - end, layout.block_size
    blocks = layout.blocks[sequence, end // size : -(-(end + keys) // size)].astype(np.int64)
    seen = tree_mask(stop - start, keys, layout.trees.get(sequence))
    rows = torch.arange(start, stop)
    return _Part(rows.to(device), torch.from_numpy(blocks).to(device), 1, keys, seen[None].to(device))


def _pieces(part: _Part, heads: int) -> Iterator[_Part]:
    """The part in runs of rows whose scores take little memory."""
    most = max(SCORE_BYTES // (4 * heads * max(part.keys, 1)), 1)
    if part.batch > 1 or len(part.rows) <= most:
        yield part
        return
    for start in range(0, len(part.rows), most):
        rows = slice(start, start + most)
        yield replace(part, rows=part.rows[rows], seen=None if part.seen is None else part.seen[:, rows])


def _attend(part: _Part, query: torch.Tensor, pairs: torch.Tensor, how: Scores) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, heads, dim] -> values as in `Joined.join`, float32 [R, heads, dim], and their weights [R, heads].

    `pairs` are the keys and values in the part's blocks, [batch * width * block_size, 2, kv_heads, dim].
    """
    rows, heads, dim = query.shape
    kv_heads, batch = pairs.shape[2], part.batch
    pairs = pairs.view(batch, -1, 2, kv_heads, dim)[:, : part.keys].float()
    key, value = pairs.permute(2, 0, 3, 1, 4).unbind(0)  # [batch, kv_heads, keys, dim]
    fed, group = rows // batch, heads // kv_heads
    # The query heads of one KV head become rows of one matrix: [batch, kv_heads, fed * group, dim].
    grouped = query.float().view(batch, fed, kv_heads, group, dim).transpose(1, 2).reshape(batch, kv_heads, -1, dim)
    scores = torch.matmul(grouped, key.transpose(-1, -2)) * how.scaling
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    if part.seen is not None:
        seen = part.seen[:, None, :, None].expand(batch, 1, fed, group, part.keys)
        scores = scores.masked_fill(~seen.reshape(batch, 1, fed * group, part.keys), float("-inf"))
    weights = scores.logsumexp(-1)
    values = torch.matmul((scores - weights[..., None]).exp(), value)

    def ungrouped(of: torch.Tensor) -> torch.Tensor:
        width = of.shape[3:]
        return of.reshape(batch, kv_heads, fed, group, *width).transpose(1, 2).reshape(rows, heads, *width)

    return ungrouped(values), ungrouped(weights)
