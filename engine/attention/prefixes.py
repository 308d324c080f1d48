"""Which sequences of a batch have leading blocks in common, so that attention reads those once for all of them.

The pool shares blocks by content, so equal leading block numbers are equal prefixes. They form a forest: some sequences
share a system prompt, some of these also its examples, some of those also the conversation so far.

Source: paper #75, "Hydragen: High-Throughput LLM Inference with Shared Prefixes".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.attention.layout import Int32, Layout

# A shorter run of keys, or one that spares fewer reads, costs more to keep apart than it saves.
LEAST_KEYS = 64
LEAST_SPARED = 256
# Keys are cut into spans of about this many, so that few nodes keep all cores busy; of many rows the spans are longer,
# since what is known of each row after each span takes memory.
SPAN_KEYS = 1024
SPAN_ROWS = 512

# As `Node` in engine/backends/native/kernels/batch.h.
NODE = np.dtype(
    [(name, np.int32) for name in ("sequence", "parent", "first", "end", "begin_key", "end_key", "spans", "before")]
)


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The forest of N shared runs of keys of one batch of B sequences.

    Attributes:
        nodes: [N] of `NODE`, parents before children: `sequence` has the keys `begin_key` to `end_key` in its leading
            blocks, as have all sequences whose rows are rows[first:end]; `parent` (-1: none) holds the keys before
            them; the keys are cut into `spans`; `before` is the sum of rows x spans of the nodes before this one.
        rows: int32, rows of the batch; of a sequence, and of the sequences of a node, they stand side by side.
        leaves: int32 [B] each sequence's deepest node; -1: it shares nothing.
        places: int32 [B] where the rows of a sequence that shares begin in `rows`.
    """

    nodes: npt.NDArray[np.void]
    rows: Int32
    leaves: Int32
    places: Int32

    @property
    def partial_rows(self) -> int:
        """Sum over the nodes of rows x spans."""
        last = self.nodes[-1]
        return int(last["before"] + (last["end"] - last["first"]) * last["spans"])


def find_prefixes(layout: Layout, least_keys: int = LEAST_KEYS, least_spared: int = LEAST_SPARED) -> Prefixes | None:
    """The prefixes of a batch that are worth reading once.

    Only whole blocks count in which every row of a sequence sees every key: those before its fed tokens and its draft
    tree. So nothing is written to them in this forward, and they need no mask.

    Args:
        layout: the batch.
        least_keys: keys a shared run must have.
        least_spared: reads of keys it must spare, over all sequences.

    Returns:
        None where there is nothing.
    """
    size = layout.block_size
    whole = _whole_blocks(layout)
    depth = max(-(-least_keys // size), 1)
    sharing = np.flatnonzero(whole >= depth)
    # Sequences that share that many blocks have the same block in the last of these places.
    if len(sharing) < 2 or len(set(layout.blocks[sharing, depth - 1].tolist())) == len(sharing):
        return None
    order, common = _sorted(layout, sharing, whole)
    runs = _runs(common, size, least_keys, least_spared)
    return _forest(layout, order, runs) if runs else None


def _whole_blocks(layout: Layout) -> Int32:
    """int32 [B]: leading blocks of each sequence that all its rows see whole."""
    own = layout.counts
    for sequence, mask in layout.trees.items():
        own[sequence] = max(own[sequence], mask.shape[1])
    return (layout.lengths - own) // layout.block_size


def _sorted(layout: Layout, sharing: npt.NDArray[np.int64], whole: Int32) -> tuple[list[int], list[int]]:
    """The sequences in an order that puts equal prefixes together, and the blocks each has in common with the next."""
    widths = whole[sharing]
    width = int(widths.max())
    tables = layout.blocks[sharing, :width]
    # What is not shared with anybody looks like no other block.
    own = -1 - np.arange(len(sharing), dtype=np.int32)[:, None]
    tables = np.where(np.arange(width) < widths[:, None], tables, own)
    keys = [table.tobytes() for table in tables]
    places = sorted(range(len(keys)), key=keys.__getitem__)
    tables = tables[places]
    differs = tables[1:] != tables[:-1]
    common = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
    return sharing[places].tolist(), common.tolist()


@dataclass(frozen=True, slots=True)
class _Run:
    """Blocks `begin` to `end` that the sequences first..last-1 of the order share; `parent`: the run before."""

    first: int
    last: int
    begin: int
    end: int
    parent: int


def _runs(common: list[int], size: int, least_keys: int, least_spared: int) -> list[_Run]:
    """The shared runs that pay, outermost first; the blocks of one that does not are left to those inside it."""
    runs: list[_Run] = []
    waiting = [(0, len(common) + 1, 0, -1)]
    while waiting:
        first, last, begin, parent = waiting.pop()
        end = min(common[first : last - 1])
        keys = (end - begin) * size
        if keys >= least_keys and (last - first - 1) * keys >= least_spared:
            runs.append(_Run(first, last, begin, end, parent))
            begin, parent = end, len(runs) - 1
        at = first
        for place in range(first, last):
            if place == last - 1 or common[place] == end:
                if place > at:
                    waiting.append((at, place + 1, begin, parent))
                at = place + 1
    return runs


def _forest(layout: Layout, order: list[int], runs: list[_Run]) -> Prefixes:
    counts = layout.counts[order]
    ends = np.cumsum(counts, dtype=np.int32)
    begins = ends - counts
    leaves = np.full(layout.num_sequences, -1, dtype=np.int32)
    places = np.zeros(layout.num_sequences, dtype=np.int32)
    places[order] = begins
    nodes, before = [], 0
    for index, run in enumerate(runs):
        leaves[order[run.first : run.last]] = index
        begin_key, end_key = run.begin * layout.block_size, run.end * layout.block_size
        first, end = int(begins[run.first]), int(ends[run.last - 1])
        spans = max(min((end_key - begin_key) // SPAN_KEYS, SPAN_ROWS // (end - first)), 1)
        nodes.append((order[run.first], run.parent, first, end, begin_key, end_key, spans, before))
        before += (end - first) * spans
    rows = np.arange(ends[-1], dtype=np.int32) + np.repeat(layout.starts[order] - begins, counts)
    return Prefixes(np.array(nodes, dtype=NODE), rows.astype(np.int32), leaves, places)
