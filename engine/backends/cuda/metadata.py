"""A batch's layout as one int64 array, so that one copy takes it to the device, padded where a CUDA graph needs it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.layout import Int64, Layout

# A tree's masks are one 64-bit word for each of its nodes.
MAX_TREE = 64
NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Extent:
    """Sizes of a batch: fed tokens (rows), sequences, and the columns of their block tables."""

    rows: int
    sequences: int
    width: int

    @classmethod
    def of(cls, layout: Layout) -> Extent:
        """Exactly what a layout takes."""
        return cls(layout.num_tokens, layout.num_sequences, layout.blocks.shape[1])

    @property
    def lengths(self) -> tuple[int, ...]:
        """Elements of each array, in the order of `Metadata`'s attributes."""
        rows, sequences = self.rows, self.sequences
        return rows, rows, rows, rows, sequences + 1, sequences, sequences, sequences * self.width


@dataclass(frozen=True, slots=True)
class Metadata:
    """Where every row belongs, on the device: views of one int64 tensor.

    Attributes:
        flat: all that follows, in this order.
        tokens: [rows] token ids; 0 in padding.
        positions: [rows]; 0 in padding.
        slots: [rows] where keys and values are written; `NOWHERE` in padding.
        tree_masks: [rows] bit i of a node's word says that it sees node i; 0 elsewhere.
        starts: [sequences + 1] rows of sequence b are starts[b] to starts[b + 1]; padding rows belong to no sequence.
        lengths: [sequences] keys, fed tokens included; 0 in padding.
        tree_sizes: [sequences] number of fed tokens, the last ones, that are a tree's nodes.
        blocks: [sequences, width] block tables.
    """

    flat: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    tree_masks: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    tree_sizes: torch.Tensor
    blocks: torch.Tensor

    @classmethod
    def empty(cls, extent: Extent, device: torch.device) -> Metadata:
        """Room on the device for any batch within `extent`; `load` one before use."""
        flat = torch.empty(sum(extent.lengths), dtype=torch.int64, device=device)
        tokens, positions, slots, masks, starts, lengths, sizes, blocks = torch.split_with_sizes(flat, extent.lengths)
        table = blocks.view(extent.sequences, extent.width)
        return cls(flat, tokens, positions, slots, masks, starts, lengths, sizes, table)

    def load(self, layout: Layout) -> None:
        """Take over a batch, padded to this size, in one copy that the host does not wait for."""
        rows, sequences = len(self.tokens), len(self.lengths)
        extent = Extent(rows, sequences, self.blocks.shape[1])
        # A fresh buffer each time: torch gives pinned memory out again only after the copy from it has ended.
        packed = torch.empty(len(self.flat), dtype=torch.int64, pin_memory=self.flat.is_cuda)
        pack(layout, extent, packed.numpy())
        self.flat.copy_(packed, non_blocking=True)


def pack(layout: Layout, extent: Extent, out: Int64) -> None:
    """Write a layout into one array, padded to `extent`.

    Padding rows come last, belong to no sequence and write nowhere; padding sequences have no rows. So nothing of a
    padded batch depends on its padding, and no slot of the pool is given up for it.

    Args:
        layout: no tree has more than `MAX_TREE` nodes.
        extent: not smaller than the layout in any direction.
        out: int64 [sum(extent.lengths)], overwritten.
    """
    ends = np.cumsum(extent.lengths)[:-1]
    tokens, positions, slots, masks, starts, lengths, sizes, blocks = np.split(out, ends)
    rows, sequences, width = layout.num_tokens, layout.num_sequences, layout.blocks.shape[1]
    for target, source, filler in (
        (tokens, layout.tokens, 0),
        (positions, layout.positions, 0),
        (slots, layout.slots, NOWHERE),
        (starts, layout.starts, rows),
        (lengths, layout.lengths, 0),
    ):
        target[: len(source)] = source
        target[len(source) :] = filler
    table = blocks.reshape(extent.sequences, extent.width)
    table[:sequences, :width] = layout.blocks
    table[sequences:] = 0
    table[:sequences, width:] = 0
    masks[:] = 0
    sizes[:] = 0
    for sequence, mask in layout.trees.items():
        end = layout.starts[sequence + 1]
        sizes[sequence] = len(mask)
        masks[end - len(mask) : end] = mask_words(mask)


def mask_words(mask: torch.Tensor) -> Int64:
    """bool [n, n], n at most `MAX_TREE` -> int64 [n]: bit j of word i is mask[i, j]."""
    bits = np.zeros((len(mask), MAX_TREE), dtype=np.uint8)
    bits[:, : len(mask)] = mask.numpy()
    words: npt.NDArray[np.int64] = np.packbits(bits, axis=1, bitorder="little").view(np.int64)[:, 0]
    return words
