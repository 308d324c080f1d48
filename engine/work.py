"""One awaited operation on a model: what its cache lacks, what a step feeds of it, and what is read back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from decoding.logits import History
from decoding.model import Row, Want
from decoding.tree import DraftTree
from engine.cache.table import BlockTable
from engine.runner import Feed


@dataclass(slots=True, eq=False)
class Work:
    """One awaited operation: bring the cache up to the sequence plus `extra`, and read rows.

    Attributes:
        table: whose cache.
        future: gets the rows.
        extra: hypothetical tokens after the sequence (a draft path, a continuation to score).
        tree: a draft tree after the sequence; excludes `extra`.
        want: what to read; None reads nothing.
        every: read after the sequence's last token and after each of `extra`, not only after the last.
        background: fills leftover budget only, and stops before the sequence's last token.
        on_row: takes the row after the sequence's last token and makes the sequence longer; True: read the next one.
        remaining: tokens still to feed, as of the last `refresh`.
        order: place in the order of submission, or of the last token of a stretch.
    """

    table: BlockTable
    future: asyncio.Future[list[Row]]
    extra: tuple[int, ...] = ()
    tree: DraftTree | None = None
    want: Want | None = None
    every: bool = False
    background: bool = False
    on_row: Callable[[Row], bool] | None = None
    rows: list[Row] = field(default_factory=list)
    remaining: int = 0
    order: int = 0

    @property
    def tenant(self) -> str:
        """Whose request it belongs to."""
        return self.table.seq.tenant

    @property
    def atomic(self) -> int:
        """Tokens at the end that are fed together."""
        return 1 + len(self.tree) if self.tree is not None else 1

    @property
    def cached(self) -> int:
        """Tokens of the sequence that are cached, as far as is known."""
        return len(self.table.tokens)

    @property
    def started(self) -> bool:
        """Whether part of the sequence is cached."""
        return len(self.table.tokens) > 0

    @property
    def running(self) -> bool:
        """Whether the answer has begun: somebody may be reading it as it comes."""
        return bool(self.table.seq.generated)

    @property
    def target_length(self) -> int:
        """Cached length once this is done (tree nodes are not cached tokens)."""
        return len(self.table.seq) - 1 if self.background else len(self.table.seq) + len(self.extra)

    @property
    def total(self) -> int:
        """Slots it needs at its end, the sequence's own included."""
        return self.target_length + (len(self.tree) if self.tree is not None else 0)

    @property
    def first_read(self) -> int:
        """Index of the first token, of the sequence and `extra`, after which a row is still to be read."""
        return len(self.table.seq) - 1 + len(self.rows) if self.every else self.target_length - 1

    def estimate(self) -> None:
        """Set what is missing of a sequence that has not been admitted: everything but what is cached now."""
        self.remaining = max(self.total - len(self.table.tokens), 1)

    def refresh(self) -> None:
        """Recompute what is missing: caches may have been shared, shortened or preempted since."""
        table = self.table
        table.adopt_prefix()
        if self.background:
            table.reconcile()
            self.remaining = max(self.target_length - len(table), 0)
            return
        self.remaining = self.total - table.reconcile(self.extra, compute_from=self.first_read)

    def feed(self, count: int) -> Feed:
        """The next `count` of the remaining tokens, with the draft tree at their end, and what to read of them."""
        table, seq = self.table, self.table.seq
        start = len(table)
        tokens = seq.tokens[start : start + count]
        if self.extra:
            tokens += self.extra[max(start - len(seq), 0) :][: count - len(tokens)]
        last = count == self.remaining
        tree = self.tree if last else None
        if tree is not None:
            tokens += tree.tokens
        return Feed(table, tokens, tree, self._reads(start, len(tokens), last))

    def _reads(self, start: int, fed: int, last: bool) -> list[tuple[int, History, Want]]:
        want, seq, tree = self.want, self.table.seq, self.tree
        if want is None or (not last and (tree is not None or not self.every)):
            return []
        if tree is not None:
            root = fed - len(tree) - 1
            paths = [(), *(tuple(tree.tokens[node] for node in tree.path(i)) for i in range(len(tree)))]
            return [(root + i, History(seq, path), want) for i, path in enumerate(paths)]
        if not self.every:
            return [(fed - 1, History(seq, self.extra), want)]
        return [
            (index - start, History(seq, self.extra[: index - len(seq) + 1]), want)
            for index in range(max(self.first_read, start), start + fed)
        ]

    def meter(self, feed: Feed, name: str, num_parameters: int) -> None:
        """Put every fed token into one of the meter's classes; the cache is still as before the forward."""
        seq, table = self.table.seq, self.table
        meter = seq.meter.of(name, num_parameters)
        start, fed = len(table), len(feed.tokens)
        prompt = max(min(seq.num_prompt_tokens - start, fed), 0)
        real = max(min(len(seq) - start, fed), 0)
        decode = 1 if not self.background and real > prompt and start + fed >= len(seq) else 0
        meter.forwards += 1
        meter.prompt_tokens += prompt
        meter.decode_tokens += decode
        meter.catchup_tokens += real - prompt - decode
        meter.draft_tokens += fed - real
        meter.cached_tokens = table.cached_on_arrival
