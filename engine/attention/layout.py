"""A ragged batch laid out flat on the host: which rows belong to whom, where they stand, where their keys go.

Index, position and slot are separate: the index of a key among those of its sequence says which rows see it, the
position what its rotation is, the slot where it lies in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]


@dataclass(slots=True)
class Layout:
    """One forward's batch of B sequences and T fed tokens.

    Attributes:
        tokens: [T] token ids.
        positions: [T] absolute positions: index of the row's key plus the sequence's offset; of rows of a block, whose
            places may be any, the block's first index plus the place plus the offset.
        slots: [T] where each token's keys and values are written.
        starts: [B + 1] rows of sequence b are starts[b] to starts[b + 1].
        lengths: [B] keys each sequence has after this forward, its fed tokens included.
        blocks: [B, W] block tables, padded with 0. Key k lies in slot blocks[k // size] * size + k % size.
        offsets: [B] what is added to an index to give a position: tokens of which no keys are kept.
        trees: sequence -> bool [k, n]: its last k fed tokens are the last of the n rows of a block (the others are its
            last keys before them), and what they see of these n; absent: plainly causal.
        block_size: tokens a block holds.
        rope_lengths: [B] lengths whose rotary frequencies each has, of `LoadedModel.rope_length`; None: all 0.
    """

    tokens: Int64
    positions: Int64
    slots: Int64
    starts: Int32
    lengths: Int32
    blocks: Int32
    offsets: Int64
    trees: dict[int, torch.Tensor] = field(default_factory=dict)
    block_size: int = 16
    rope_lengths: Int64 | None = None

    @property
    def counts(self) -> Int32:
        """[B] tokens fed of each sequence."""
        return np.diff(self.starts)

    @property
    def num_sequences(self) -> int:
        """B."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.tokens)

    @property
    def places(self) -> Int64:
        """[T] positions without the offsets: where rows stand among the keys of their sequences."""
        return self.positions - np.repeat(self.offsets, self.counts)

    @property
    def row_rope_lengths(self) -> Int64 | None:
        """[T] `rope_lengths` of each row."""
        return None if self.rope_lengths is None else np.repeat(self.rope_lengths, self.counts)


def lay_out(
    tokens: list[int],
    counts: list[int],
    cached: list[int],
    tables: list[Int32],
    block_size: int,
    trees: Mapping[int, tuple[torch.Tensor, Sequence[int]]],
    offsets: Sequence[int] | None = None,
    rope_lengths: Sequence[int] = (),
) -> Layout:
    """Work out every row's position and slot at once.

    Args:
        tokens: [T] fed tokens of all sequences in order.
        counts: [B] how many of them belong to each.
        cached: [B] tokens each has in the cache already.
        tables: [B] each sequence's blocks, room for the fed tokens included.
        block_size: tokens a block holds.
        trees: sequence -> (bool [k, n] as in `Layout.trees`, [k] places after the tokens before the block).
        offsets: [B] as in `Layout.offsets`; None: all 0.
        rope_lengths: [B] as in `Layout.rope_lengths`; empty: all 0.
    """
    fed = np.asarray(counts, dtype=np.int64)
    context = np.asarray(cached, dtype=np.int64)
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(fed, out=starts[1:])
    lengths = context + fed
    width = int(-(-lengths.max() // block_size))
    blocks = np.zeros((len(counts), width), dtype=np.int32)
    for row, table in enumerate(tables):
        used = min(len(table), width)
        blocks[row, :used] = table[:used]
    owner = np.repeat(np.arange(len(counts)), fed)
    index = np.arange(len(tokens)) + (context - starts[:-1])[owner]
    slots = blocks[owner, index // block_size].astype(np.int64) * block_size + index % block_size
    moved = np.zeros(len(counts), dtype=np.int64) if offsets is None else np.asarray(offsets, dtype=np.int64)
    positions = index + moved[owner]
    for sequence, (mask, places) in trees.items():
        end = int(starts[sequence + 1])
        base = int(lengths[sequence]) - mask.shape[1] + moved[sequence]
        positions[end - len(places) : end] = base + np.asarray(places, dtype=np.int64)
    masks = {sequence: mask for sequence, (mask, _) in trees.items()}
    return Layout(
        np.asarray(tokens, dtype=np.int64),
        positions,
        slots,
        starts,
        lengths.astype(np.int32),
        blocks,
        moved,
        masks,
        block_size,
        np.asarray(rope_lengths, dtype=np.int64) if any(rope_lengths) else None,
    )


def select(layout: Layout, sequences: Int64) -> tuple[Layout, Int64]:
    """Some sequences of a batch as a batch of their own, and which rows of the whole are theirs, int64 [rows]."""
    counts = layout.counts[sequences]
    starts = np.zeros(len(sequences) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    rows = np.arange(starts[-1], dtype=np.int64) + np.repeat(layout.starts[sequences] - starts[:-1], counts)
    part = Layout(
        layout.tokens[rows],
        layout.positions[rows],
        layout.slots[rows],
        starts,
        layout.lengths[sequences],
        layout.blocks[sequences],
        layout.offsets[sequences],
        {place: layout.trees[b] for place, b in enumerate(sequences.tolist()) if b in layout.trees},
        layout.block_size,
        None if layout.rope_lengths is None else layout.rope_lengths[sequences],
    )
    return part, rows
