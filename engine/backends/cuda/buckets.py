"""Buckets of batch shapes: few enough for each to have a graph of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.attention.layout import Layout
from engine.backends.cuda.paged_attention import Reach

MAX_ROWS = 64
# Smallest width of a block table, and the factor from one bucket's width to the next.
WIDTH, WIDER = 64, 4
# Rows of a sequence that feeds several, as a rule: a short draft. Wrong guesses cost time, nothing else.
TYPICAL_SPAN = 4


@dataclass(frozen=True, slots=True)
class Bucket:
    """Batches that are computed alike: one graph serves them.

    Attributes:
        rows: fed tokens at most, a power of two; as many sequences at most.
        is_single: no sequence feeds more than one token.
        width: columns of the block tables.
    """

    rows: int
    is_single: bool
    width: int

    @classmethod
    def of(cls, layout: Layout) -> Bucket | None:
        """The smallest that holds a batch; None: more than `MAX_ROWS` rows."""
        if layout.num_tokens > MAX_ROWS:
            return None
        width = WIDTH
        while width < layout.blocks.shape[1]:
            width *= WIDER
        return cls(1 << (layout.num_tokens - 1).bit_length(), int(layout.counts.max()) == 1, width)

    def reach(self, block_size: int) -> Reach:
        """Bounds of its batches."""
        keys = self.width * block_size
        if self.is_single:
            return Reach(self.rows, self.rows, 1, keys)
        return Reach(self.rows, max(self.rows // TYPICAL_SPAN, 1), self.rows, keys)

    @property
    def smallest(self) -> tuple[int, int, int]:
        """The smallest batch it serves: sequences, tokens each feeds, blocks of one of them."""
        rows, blocks = self.rows // 2 + 1, 1 if self.width == WIDTH else self.width // WIDER + 1
        return (rows, 1, blocks) if self.is_single else (1, rows, blocks)


def buckets(most_blocks: int) -> Iterator[Bucket]:
    """Yield all buckets for sequences of at most `most_blocks` blocks."""
    width = WIDTH
    while True:
        for power in range(MAX_ROWS.bit_length()):
            yield Bucket(1 << power, True, width)
            if power:
                yield Bucket(1 << power, False, width)
        if width >= most_blocks:
            return
        width *= WIDER
