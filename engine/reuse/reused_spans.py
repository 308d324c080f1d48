"""What one sequence takes over from other caches, forward by forward, and how far it is from exact."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from decoding.partial_forward import WHOLE
from engine.cache.blocks import BlockPool
from engine.reuse.matcher import Int64
from engine.reuse.settings import ReuseSettings
from turnout.types import BlockHash

if TYPE_CHECKING:
    from engine.cache.table import BlockTable
    from engine.runner import Feed

NOWHERE: Int64 = np.zeros(0, dtype=np.int64)


class Source(Protocol):
    """A sequence whose KV may be taken over, as long as it is there."""

    @property
    def end(self) -> int:
        """One behind the last token whose KV may be there."""
        ...

    def block(self, index: int) -> int | None:
        """The pool's block with its tokens from `index` times the block size on, where it is there."""
        ...


@dataclass(frozen=True, slots=True)
class Published:
    """A prompt whose blocks are found by their content: those that were evicted meanwhile are computed."""

    pool: BlockPool
    hashes: tuple[BlockHash, ...]

    @property
    def end(self) -> int:
        """See `Source.end`."""
        return len(self.hashes) * self.pool.block_size

    def block(self, index: int) -> int | None:
        """See `Source.block`."""
        return self.pool.find(self.hashes[index])


@dataclass(frozen=True, slots=True)
class Held:
    """Another sequence's cache: what it lacks by then, because it was released or preempted, is computed."""

    table: BlockTable

    @property
    def end(self) -> int:
        """See `Source.end`; what lies behind the sequence's own tokens was only tried."""
        mine, theirs = self.table.tokens, self.table.seq.tokens
        end = min(len(mine), len(theirs))
        return next((place for place in range(end) if mine[place] != theirs[place]), end)

    def block(self, index: int) -> int | None:
        """See `Source.block`."""
        return self.table.blocks[index]


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens whose KV is taken over: from `start` on here, from `origin` on in the source."""

    start: int
    origin: int
    length: int
    source: Source

    @property
    def end(self) -> int:
        """One behind the last."""
        return self.start + self.length

    @property
    def shift(self) -> int:
        """Positions its keys move by."""
        return self.start - self.origin

    def within(self, start: int, end: int) -> Span | None:
        """Return the part of the span in positions `start` to `end` - 1; None if it is empty."""
        first, last = max(start, self.start), min(end, self.end)
        return Span(first, first - self.shift, last - first, self.source) if first < last else None


@dataclass(slots=True)
class ReuseCounts:
    """What was done with spans, in tokens.

    Attributes:
        taken: given KV of other positions.
        recomputed: of these, computed again in the prefill.
        corrected: computed again while decoding.
        rows: that went through all layers for sequences with spans.
    """

    taken: int = 0
    recomputed: int = 0
    corrected: int = 0
    rows: int = 0

    def add(self, other: ReuseCounts) -> None:
        """Sum up."""
        self.taken += other.taken
        self.recomputed += other.recomputed
        self.corrected += other.corrected
        self.rows += other.rows


class Reused:
    """One table's spans. Used by the event loop between forwards and by the forward's thread during one.

    Args:
        spans: disjoint.
        length: tokens of the sequence they lie in.
        settings: what is computed again.

    Attributes:
        deviations: float32 [length], how far the KV at a place is from what the check layer said; nan: not taken
            over, not measured, or computed again.
        again: places to compute again along with the next token.
        counts: what was done so far.
    """

    def __init__(self, spans: list[Span], length: int, settings: ReuseSettings) -> None:
        self.spans = sorted(spans, key=lambda span: span.start)
        self.settings = settings
        self.deviations: npt.NDArray[np.float32] = np.full(length, np.nan, dtype=np.float32)
        self.again: list[int] = []
        self.counts = ReuseCounts()
        self._end = 0

    @property
    def tokens(self) -> int:
        """How many there are to take over."""
        return sum(span.length for span in self.spans)

    def part(self, feed: Feed) -> Partial | None:
        """What of a feed need not be computed, and what is computed along with it; None: nothing of either."""
        table = feed.table
        start = len(table)
        end = start + len(feed.tokens) - feed.num_rows
        if start < self._end:  # the cache was dropped since: whatever was known of it is void
            self._forget()
        if feed.traced or feed.pooled is not None or feed.depth != WHOLE:
            return None
        # The last token says what comes next: it is always computed.
        last = min(end, len(table.seq) - 1)
        spans = [part for span in self.spans if (part := span.within(start, last)) is not None]
        if spans:
            self._end = min(end, max(span.start + span.length for span in self.spans))
            return Partial(self, feed, spans, [], watches=end >= len(table.seq) and self._corrects)
        single = len(feed.tokens) == 1 and feed.block is None and end == len(table.seq)
        if single and self._corrects and not np.isnan(self.deviations).all():
            return Partial(self, feed, [], self.again, watches=True)
        return None

    @property
    def _corrects(self) -> bool:
        return self.settings.decode_tokens > 0 and self.settings.recompute > 0

    def _forget(self) -> None:
        self.deviations.fill(np.nan)
        self.again = []
        self._end = 0


@dataclass(slots=True, eq=False)
class Partial:
    """One feed of a sequence with spans.

    Attributes:
        reused: the sequence's.
        feed: whose part it is.
        spans: what it may take over.
        again: places before it that are computed again, in their slots.
        watches: whether what its last token looks at is wanted.
        given: int64 [g] places whose KV is taken over; set by `hold`, as are the slots it comes from and how far the
            keys move.
        spared: computation left out, in tokens; below 0 where more was computed than was fed.
    """

    reused: Reused
    feed: Feed
    spans: list[Span]
    again: list[int]
    watches: bool = False
    given: Int64 = field(default_factory=lambda: NOWHERE)
    sources: Int64 = field(default_factory=lambda: NOWHERE)
    shifts: Int64 = field(default_factory=lambda: NOWHERE)
    spared: float = 0.0
    _held: list[int] = field(default_factory=list)

    @property
    def table(self) -> BlockTable:
        """Whose cache."""
        return self.feed.table

    @property
    def acts(self) -> bool:
        """Whether it is other than a plain feed."""
        return bool(len(self.given) or self.again or self.watches)

    def hold(self) -> None:
        """Look for what is to be taken over, and keep it until `let_go`: when all of a step's memory is reserved."""
        table, pool = self.table, self.table.pool
        exact = table.content.tainted_from
        # What others hold too, and what exact sequences may find, is not to be written to.
        self.again = [
            place
            for place in self.again
            if exact is not None and place >= exact and pool.is_exclusive(table.blocks[place // pool.block_size])
        ]
        parts = [self._take(span) for span in self.spans]
        self.given, self.sources, self.shifts = (
            np.concatenate([NOWHERE, *(part[column] for part in parts)]) for column in range(3)
        )

    def _take(self, span: Span) -> tuple[Int64, Int64, Int64]:
        """Places, the slots their KV comes from, and shifts, of what the source still has of a span."""
        pool = self.table.pool
        size = pool.block_size
        first, last = span.origin, min(span.origin + span.length, span.source.end)
        origins: list[Int64] = [NOWHERE]
        slots: list[Int64] = [NOWHERE]
        for index in range(first // size, -(-last // size)):
            begin, end = max(first, index * size), min(last, (index + 1) * size)
            block = span.source.block(index)
            if block is not None:
                pool.retain(block)
                self._held.append(block)
                origins.append(np.arange(begin, end, dtype=np.int64))
                slots.append(origins[-1] + (block - index) * size)
        taken = np.concatenate(origins)
        return taken + span.shift, np.concatenate(slots), np.full(len(taken), span.shift, dtype=np.int64)

    def let_go(self) -> None:
        """The forward has ended, or does not take place."""
        self.table.pool.release(self._held)
        self._held = []
