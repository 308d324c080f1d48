"""Some of a batch's rows as a batch of their own, in place: keys of the others are seen, and stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.layout import Int32, Int64, Layout

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Again:
    """Tokens before those that a sequence feeds, to be computed once more: [r] places in rising order.

    Attributes:
        places: where they stand.
        tokens: their ids.
        slots: where their keys and values lie.
    """

    places: Int64
    tokens: Int64
    slots: Int64


@dataclass(frozen=True, slots=True)
class Picked:
    """Rows of a batch of B sequences.

    Attributes:
        layout: of these rows; sequences that have none of them are left out.
        starts: [B + 1] rows of sequence b of the batch are starts[b] to starts[b + 1].
        names: int64 [rows] which ones: a row of the batch by its number, rows of `Again` by numbers behind these.
    """

    layout: Layout
    starts: Int32
    names: Int64

    def rows_of(self, names: Int64) -> Int64:
        """Where rows of these names, all of which must be here, stand."""
        order = np.argsort(self.names)
        return order[np.searchsorted(self.names, names, sorter=order)]


def pick(layout: Layout, again: Mapping[int, Again], kept: Mapping[int, Bools]) -> Picked:
    """Rows of a batch, each of which sees every key up to its own, whichever forward that is of.

    Args:
        layout: the batch.
        again: sequence -> rows to add before its own.
        kept: sequence -> which of its rows; absent: all. Rows of a draft tree must be kept.
    """
    number = layout.num_tokens
    added: list[Again] = []
    moved: list[Int64] = []  # their positions
    chosen: list[Int64] = []
    counts: list[int] = []
    trees: dict[int, torch.Tensor] = {}
    for sequence in range(layout.num_sequences):
        first, end = int(layout.starts[sequence]), int(layout.starts[sequence + 1])
        rows = np.arange(first, end, dtype=np.int64)
        if sequence in kept:
            rows = rows[kept[sequence]]
        length = int(layout.lengths[sequence])
        keys = rows + (length - end)
        if sequence in again:
            more = again[sequence]
            chosen.append(number + np.arange(len(more.places), dtype=np.int64))
            number += len(more.places)
            added.append(more)
            moved.append(more.places + layout.offsets[sequence])
            keys = np.concatenate([more.places, keys])
        chosen.append(rows)
        tree = _mask(keys, length, layout.trees.get(sequence))
        if tree is not None:
            trees[sum(count > 0 for count in counts)] = tree
        counts.append(len(keys))
    names = np.concatenate(chosen)
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    filled = np.asarray(counts) > 0
    picked = Layout(
        np.concatenate([layout.tokens, *(more.tokens for more in added)])[names],
        np.concatenate([layout.positions, *moved])[names],
        np.concatenate([layout.slots, *(more.slots for more in added)])[names],
        np.append(starts[:-1][filled], starts[-1]),
        layout.lengths[filled],
        layout.blocks[filled],
        layout.offsets[filled],
        trees,
        layout.block_size,
    )
    return Picked(picked, starts, names)


def _mask(keys: Int64, length: int, tree: torch.Tensor | None) -> torch.Tensor | None:
    """What rows see of the last keys of a sequence, as in `Layout.trees`; None: plainly causal.

    Args:
        keys: [k] index of each row's own key, rising.
        length: keys of the sequence.
        tree: bool [t, n] of a draft tree whose fed nodes are the last t rows.
    """
    if len(keys) == 0 or keys[0] == length - len(keys):
        return tree
    root = int(keys[0]) if tree is None else min(int(keys[0]), length - tree.shape[1])
    mask = np.arange(root, length)[None] <= keys[:, None]
    if tree is not None:
        fed, nodes = tree.shape
        mask[-fed:, : length - nodes - root] = True
        mask[-fed:, length - nodes - root :] = tree.numpy()
    return torch.from_numpy(mask)
