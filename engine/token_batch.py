"""Sequences that decode token by token, laid out by arrays that serve step after step."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import numpy as np
import torch

from decoding.model import Readout
from decoding.token_reader import TokenReader
from engine.attention.layout import Layout

if TYPE_CHECKING:
    from engine.runner import Feed


class TokenBatch(Items["Feed"]):
    """One token of each of B sequences, of a step and of those that follow it.

    The tables' lengths are looked at once, and may be as they were some steps before.

    Args:
        feeds: [B], each of one token, whose row is read; blocks for all steps have been reserved.
        block_size: tokens a block holds.
        device: where rows are read.
    """

    def __init__(self, feeds: list[Feed], block_size: int, device: torch.device) -> None:
        tables = [feed.table for feed in feeds]
        self._feeds, self._size = feeds, block_size
        self._tokens = np.array([feed.tokens[0] for feed in feeds], dtype=np.int64)
        self._cached = np.array([len(table.tokens) for table in tables], dtype=np.int64)
        self._offsets = np.array([table.offset for table in tables], dtype=np.int64)
        lengths = [table.content.rope_length for table in tables]
        self._rope_lengths = np.array(lengths, dtype=np.int64) if any(lengths) else None
        self._starts = np.arange(len(feeds) + 1, dtype=np.int32)
        self._blocks = np.zeros((len(feeds), max(len(table.blocks) for table in tables)), dtype=np.int32)
        for row, table in zip(self._blocks, tables, strict=True):
            row[: len(table.blocks)] = table.block_array
        self._rows = np.arange(len(feeds))
        self.picked = torch.arange(len(feeds), dtype=torch.int64, device=device)
        self._reader = TokenReader([table.seq for table in tables], [feed.reads[0][2] for feed in feeds])

    def __len__(self) -> int:
        return len(self._feeds)

    def __getitem__(self, place: int) -> Feed:  # type: ignore[override]  # it is not sliced
        feed = self._feeds[place]
        feed.tokens = [int(self._tokens[place])]
        return feed

    def layout(self) -> Layout:
        """Lay the step out."""
        cached, size = self._cached, self._size
        lengths = cached + 1
        width = -(-int(lengths.max()) // size)
        blocks = self._blocks if width == self._blocks.shape[1] else np.ascontiguousarray(self._blocks[:, :width])
        slots = self._blocks[self._rows, cached // size].astype(np.int64) * size + cached % size
        return Layout(
            self._tokens,
            cached + self._offsets,
            slots,
            self._starts,
            lengths.astype(np.int32),
            blocks,
            self._offsets,
            {},
            size,
            self._rope_lengths,
        )

    def read(self, logits: torch.Tensor) -> Items[list[Readout]]:
        """Read the rows [B, vocab] that came out of the step."""
        return self._reader.read(logits, self._cached + 1)

    def advance(self, tokens: list[int]) -> None:
        """Go on to the next step, which feeds these tokens [B]."""
        self._tokens = np.array(tokens, dtype=np.int64)
        self._cached = self._cached + 1
