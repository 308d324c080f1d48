"""An operation that waits for forwards: what its cache lacks, what a step feeds of it, and what is read back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from decoding.block import Block
from decoding.decode_loop import DecodeLoop
from decoding.model import Readout, ReadSpec
from decoding.partial_forward import WHOLE, Exit
from decoding.row_context import RowContext
from decoding.token_reader import reads_ahead
from engine.cache.table import BlockTable
from engine.processor_states import first_without_states, lacks_last, reads_layers
from engine.runner import Feed
from turnout.tracing import current

if TYPE_CHECKING:
    from opentelemetry.trace import Span

NO_ROWS = Block.chain(())


@dataclass(slots=True, eq=False)
class QueuedOperation:
    """An awaited operation: bring the cache up to the sequence, run the rows of a block after it, and read some rows.

    Attributes:
        table: whose cache.
        block: the rows.
        apart: they are run in one forward, and stay behind the cached tokens, in scratch slots. False: they are a chain
            through all layers, which is cached like the tokens of the sequence, and fed in parts if need be.
        first_row: the first row to read, all after it are read too; -1: the last token before the block.
        want: what to read; None reads nothing.
        num_free: the last rows of the block that are no candidates: constraints do not hold for them.
        want_free: what to read after these.
        exit: what stands in place of the last norm, for what is read.
        background: fills leftover budget only, and stops before the sequence's last token.
        loop: takes the row after the sequence's last token and makes the sequence longer, until it ends: rows are
            handed over as they come, without waking the waiting task.
        future: gets the rows.
        rows: those read so far.
        traces: hidden states that the first row is to have of the tokens before it, as far as these are computed.
        traced: cached length at their end.
        pooled_sum: sum of the hidden states that `ReadSpec.mean` is of, as far as they are computed.
        num_pooled: the first tokens, which are in it.
        cached_rows: rows of the block that are cached, as of the last `refresh`.
        remaining: tokens still to feed, as of the last `refresh`.
        order: place in the order of submission; in a decode loop, of its last token.
        overtaken: operations submitted after it that started before it.
        span: what it is part of, of a traced request.
        repeated: of a decode loop, the feed of all steps that `repeats` stands for: only its token changes.
    """

    table: BlockTable
    block: Block = NO_ROWS
    apart: bool = False
    first_row: int = -1
    want: ReadSpec | None = None
    num_free: int = 0
    want_free: ReadSpec = ReadSpec(draw=None)
    exit: Exit | None = None
    background: bool = False
    loop: DecodeLoop | None = None
    future: asyncio.Future[list[Readout]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    rows: list[Readout] = field(default_factory=list)
    traces: list[dict[int, torch.Tensor]] = field(default_factory=list)
    traced: int = 0
    pooled_sum: torch.Tensor | None = None
    num_pooled: int = 0
    cached_rows: int = 0
    remaining: int = 0
    order: int = 0
    overtaken: int = 0
    span: Span | None = field(default_factory=current)
    repeated: Feed | None = None

    @property
    def tenant(self) -> str:
        """Whose request it belongs to."""
        return self.table.seq.tenant

    @property
    def low_priority(self) -> bool:
        """Whether interactive operations go first."""
        return self.table.seq.low_priority

    @property
    def atomic(self) -> int:
        """Tokens at the end that are fed together: rows, and the token before them where it is read with them."""
        return len(self.block) - self.cached_rows + (self.first_row < 0) if self.apart else 1

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
        """Whether the answer has begun: it may be read as it comes."""
        return bool(self.table.seq.generated)

    @property
    def hit_rate(self) -> float:
        """Share of a sequence that has not started that is found in the pool, or taken over from elsewhere."""
        table, pool = self.table, self.table.pool
        hashes = table.content.first((len(table.seq) - 1) // pool.block_size)
        found = next((place for place, content in enumerate(hashes) if pool.find(content) is None), len(hashes))
        elsewhere = table.reused.tokens if table.reused is not None else 0
        return min((found * pool.block_size + elsewhere) / len(table.seq), 1.0)

    @property
    def base(self) -> int:
        """Tokens of the sequence before the block."""
        if self.block.base is not None:
            return self.block.base
        return len(self.table.seq) - self.background

    @property
    def total(self) -> int:
        """Slots it needs at its end, the sequence's own included."""
        return self.base + len(self.block)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that it still has to feed, as far as known: of a loop whose steps run, one is to come."""
        if self.repeated is not None and self.table.in_flight:
            return 1  # what was handed out is not entered into the cache before they end
        return max(self.total - self.cached, 1)

    @property
    def first_read(self) -> int:
        """Index of the first token, of the sequence and the block, after which a row is still to be read."""
        return self.base + self.first_row + len(self.rows)

    def estimate(self) -> None:
        """Set what is missing of a sequence that has not been admitted: everything but what is cached now."""
        self.remaining = max(self.total - len(self.table.tokens), 1)

    @property
    def repeats(self) -> bool:
        """Whether its next step is as its last one was: a decode loop that feeds and reads one token."""
        if self.loop is None or self.block is not NO_ROWS or self.background or self.traces:
            return False
        table = self.table
        return table.reused is None and not self.future.done() and lacks_last(table) and bool(table.seq.generated)

    @property
    def runs(self) -> bool:
        """Whether steps of it, which `repeats`, may follow each other while their rows are still to be handed out.

        Rules end a loop often: what would have been computed beyond them would cost more than it spares.
        """
        if self.loop is None or self.loop.ruled or self.want is None or self.span is not None:
            return False
        return reads_ahead(self.table.seq, self.want)

    def refresh(self) -> None:
        """Recompute what is missing: caches may have been shared, shortened or preempted since."""
        if self.repeats:
            self.remaining, self.cached_rows = 1, 0
            return
        table, block = self.table, self.block
        table.adopt_prefix()
        last = self.base if self.apart else self.total  # rows apart from the sequence's cache are no part of its tokens
        read_from = None if self.want is None else min(self.first_read, last, first_without_states(table))
        if self._pools:
            read_from = min(self.num_pooled, last, first_without_states(table))
        kept = table.reconcile(() if self.apart else block.tokens, compute_from=read_from)
        self.cached_rows = block.resume if kept == self.base and table.scratch.holds(block) else 0
        self.remaining = max(self.total - kept - self.cached_rows, 0)

    def next_token(self) -> Feed:
        """The sequence's last token, and what to read after it: the feed of an operation that `repeats`."""
        seq = self.table.seq
        if self.repeated is None:
            assert self.want is not None
            self.repeated = Feed(self.table, [], reads=[(0, RowContext(seq), self.want)])
        self.repeated.tokens = seq.tokens[-1:]
        return self.repeated

    def feed(self, count: int) -> Feed:
        """The next `count` of the remaining tokens, with the rows that are run apart, and what to read of them.

        Tokens before rows that run through some layers only are fed in a forward of their own, through all layers.
        """
        table, block, base = self.table, self.block, self.base
        start, last = len(table), count == self.remaining
        tokens = table.seq.tokens[start : min(start + count, base)]
        if not self.apart:
            tokens += block.tokens[max(start - base, 0) :][: count - len(tokens)]
            feed = Feed(table, tokens)
        elif last and (start == base or block.layers == WHOLE):
            tokens += block.tokens[self.cached_rows :]
            feed = Feed(table, tokens, block, self.cached_rows, exit=self.exit)
            feed.depth, feed.states = block.layers, block.states
            if self.first_row < 0 and block.is_chain and start == base - 1 and not reads_layers(table):
                held = table.scratch.states_of((table.seq.tokens[-1], *block.tokens))
                feed.depth, feed.states = held or (feed.depth, feed.states)
        else:
            feed = Feed(table, tokens)
        feed.reads = self._reads(start + feed.cached_rows, len(tokens))
        if self.want is not None and not self.rows and (len(tokens) > 1 or not last or self.traces):
            feed.traced = self.want.before  # of a single token that is read, nothing is before it
        if self._pools:
            pooled = slice(max(self.num_pooled - start, 0), min(self.first_read + 1 - start, len(tokens)))
            feed.pooled = pooled if pooled.start < pooled.stop else None
        if table.reused is not None:
            feed.partial = table.reused.part(feed)
        return feed

    def _reads(self, start: int, fed: int) -> list[tuple[int, RowContext, ReadSpec]]:
        """What to read of the tokens from `start` on, of the sequence and the block."""
        if self.want is None:
            return []
        return [
            (index - start, *self._read_at(index - self.base, self.want))
            for index in range(max(self.first_read, start), start + fed)
        ]

    def _read_at(self, row: int, want: ReadSpec) -> tuple[RowContext, ReadSpec]:
        seq, block = self.table.seq, self.block
        if row >= len(block) - self.num_free:
            return RowContext(seq, free=True), self.want_free
        return RowContext(seq, block.path(row)[len(seq) - self.base :]), want

    def enter(self, feed: Feed, keeps_trees: bool) -> None:
        """Let the cache know what was computed.

        Args:
            feed: it.
            keeps_trees: whether a later forward can see the rows of a block that is no chain.
        """
        table, block = self.table, feed.block
        if block is None:
            table.filled(feed.tokens)
            return
        if own := feed.tokens[: len(feed.tokens) - feed.num_rows]:
            table.filled(own)
        if keeps_trees or block.is_chain:
            table.scratch.hold(block, feed.cached_rows, feed.states if feed.keeps_states else None, keeps_trees)
        else:
            table.scratch.forget()

    def keep_traces(self, feed: Feed, rows: list[Readout]) -> None:
        """Gather what `ReadSpec.before` asks for, and give it to the first row; the cache is as before the forward."""
        if not feed.traced:
            return
        if (start := len(self.table)) != self.traced:  # the cache was shortened meanwhile, or this is the first part
            self.traces.clear()
        end = feed.reads[0][0] if rows else len(feed.tokens)
        self.traces.append({layer: states[:end] for layer, states in feed.traces.items()})
        self.traced = start + end
        if rows:
            layers = feed.traced.intersection(*self.traces)
            rows[0].before = {layer: torch.cat([part[layer] for part in self.traces]) for layer in layers}

    @property
    def _pools(self) -> bool:
        return self.want is not None and self.want.mean and not self.rows

    def keep_mean(self, feed: Feed, rows: list[Readout]) -> None:
        """Add up what `ReadSpec.mean` asks for, and give it to the first row; the cache is as before the forward."""
        if feed.pooled is None or feed.pooled_sum is None:
            return
        self.pooled_sum = feed.pooled_sum if self.pooled_sum is None else self.pooled_sum + feed.pooled_sum
        self.num_pooled = len(self.table) + feed.pooled.stop
        if rows:
            rows[0].mean = (self.pooled_sum / self.num_pooled).float()
