"""One awaited operation on a model: what its cache lacks, what a step feeds of it, and what is read back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from decoding.logits import History
from decoding.model import Row, Want
from decoding.partial_forward import WHOLE, Depth, Sketch
from decoding.tree import DraftTree
from engine.cache.table import BlockTable
from engine.runner import Feed
from turnout.tracing import current

if TYPE_CHECKING:
    from opentelemetry.trace import Span


@dataclass(slots=True, eq=False)
class Work:
    """One awaited operation: bring the cache up to the sequence plus `extra`, and read rows.

    Attributes:
        table: whose cache.
        extra: hypothetical tokens after the sequence (a draft path, a continuation to score).
        tree: a draft tree after the sequence; excludes `extra`.
        grows: the tree is only drafted on: its nodes from `first_node` on are fed and read, and not the root.
        first_node: see `grows`; nodes before it need not be fed again where they are still cached.
        sketch: tokens to run through some layers only; excludes `extra` and `tree`.
        want: what to read; None reads nothing.
        want_extra: what to read after a tree's extra rows.
        every: read after the sequence's last token and after each of `extra`, not only after the last.
        background: fills leftover budget only, and stops before the sequence's last token.
        on_row: takes the row after the sequence's last token and makes the sequence longer; True: read the next one.
            Rows are then handed over as they come, without waking whoever waits, until it returns False.
        future: gets the rows.
        traces: hidden states that the first row is to have of the tokens before it, as far as these are computed.
        traced: cached length at their end.
        remaining: tokens still to feed, as of the last `refresh`.
        order: place in the order of submission, or of the last token of a stretch.
        overtaken: operations submitted after it that started before it.
        span: what it is part of, of a traced request.
    """

    table: BlockTable
    extra: tuple[int, ...] = ()
    tree: DraftTree | None = None
    grows: bool = False
    first_node: int = 0
    sketch: Sketch | None = None
    want: Want | None = None
    want_extra: Want = Want(draw=None)
    every: bool = False
    background: bool = False
    on_row: Callable[[Row], bool] | None = None
    future: asyncio.Future[list[Row]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    rows: list[Row] = field(default_factory=list)
    traces: list[dict[int, torch.Tensor]] = field(default_factory=list)
    traced: int = 0
    cached_nodes: int = 0
    remaining: int = 0
    order: int = 0
    overtaken: int = 0
    span: Span | None = field(default_factory=current)

    @property
    def tenant(self) -> str:
        """Whose request it belongs to."""
        return self.table.seq.tenant

    @property
    def patient(self) -> bool:
        """Whether it gives way to operations that are not."""
        return self.table.seq.patient

    @property
    def atomic(self) -> int:
        """Tokens at the end that are fed together."""
        if self.grows or self.sketch is not None:
            return self.num_nodes - self.cached_nodes
        return 1 + self.num_nodes

    @property
    def num_nodes(self) -> int:
        """Rows of the tree, the extra ones included, or of the sketch."""
        if self.sketch is not None:
            return len(self.sketch.tokens)
        return len(self.tree.fed_tokens) if self.tree is not None else 0

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
    def hit_rate(self) -> float:
        """Share of a sequence that has not started that is found in the pool, or taken over from elsewhere."""
        table, pool = self.table, self.table.pool
        hashes = table.content.first((len(table.seq) - 1) // pool.block_size)
        found = next((place for place, content in enumerate(hashes) if pool.find(content) is None), len(hashes))
        elsewhere = table.reused.tokens if table.reused is not None else 0
        return min((found * pool.block_size + elsewhere) / len(table.seq), 1.0)

    @property
    def target_length(self) -> int:
        """Cached length once this is done (tree nodes are not cached tokens)."""
        if self.sketch is not None:
            return self.sketch.base
        return len(self.table.seq) - 1 if self.background else len(self.table.seq) + len(self.extra)

    @property
    def total(self) -> int:
        """Slots it needs at its end, the sequence's own included."""
        return self.target_length + self.num_nodes

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
        if self.sketch is not None:
            kept = table.reconcile(compute_from=self.sketch.base)
            whole = kept == self.sketch.base and table.tail.holds_sketch(self.sketch)
            self.cached_nodes = self.sketch.start if whole else 0
            self.remaining = self.total - kept - self.cached_nodes
            return
        if self.grows:
            assert self.tree is not None
            kept = table.reconcile()
            whole = kept == len(table.seq)
            self.cached_nodes = self.first_node if whole and table.tail.holds(self.tree, self.first_node) else 0
            self.remaining = self.total - kept - self.cached_nodes
            return
        self.remaining = self.total - table.reconcile(self.extra, compute_from=self.first_read)

    def feed(self, count: int) -> Feed:
        """The next `count` of the remaining tokens, with the draft tree at their end, and what to read of them."""
        table, seq = self.table, self.table.seq
        start = len(table)
        if self.sketch is not None:
            return self._sketch_feed(self.sketch, count)
        tokens = seq.tokens[start : start + count]
        if self.extra:
            tokens += self.extra[max(start - len(seq), 0) :][: count - len(tokens)]
        last = count == self.remaining
        tree = self.tree if last else None
        if tree is not None:
            tokens += tree.fed_tokens[self.cached_nodes :]
        feed = Feed(table, tokens, tree, self.cached_nodes, self._reads(start, len(tokens), last))
        if self.want is not None and not self.rows and (len(tokens) > 1 or not last or self.traces):
            feed.traced = self.want.before  # of a single token that is read, nothing is before it
        if tree is not None and tree.is_chain and not self.grows and start == len(seq) - 1:
            held = table.tail.resumable((seq.tokens[-1], *tree.tokens))
            if held is not None:
                feed.depth, feed.states = Depth(first=held.depth.last or 0), held.states
        if table.reused is not None:
            feed.partial = table.reused.part(feed)
        return feed

    def _sketch_feed(self, sketch: Sketch, count: int) -> Feed:
        """What the base lacks goes through all layers, in a forward of its own; then the sketch."""
        table, seq = self.table, self.table.seq
        start = len(table)
        if start < sketch.base:
            return Feed(table, seq.tokens[start : min(start + count, sketch.base)])
        first = self.cached_nodes
        tree = DraftTree(sketch.tokens, sketch.parents, "")
        real = len(seq) - sketch.base  # so many tokens of every path are the sequence's own
        chain = tree.is_chain

        def history(node: int) -> History:
            path = range(node + 1) if chain else tree.path(node)
            return History(seq, tuple(sketch.tokens[each] for each in path[real:]))

        reads = [
            (node - first, history(node), self.want)
            for node in range(sketch.start, len(sketch.tokens))
            if self.want is not None
        ]
        return Feed(
            table,
            list(sketch.tokens[first:]),
            tree,
            first,
            reads,
            depth=sketch.depth,
            states=sketch.states,
            keeps_states=True,
            exit=sketch.exit,
        )

    def _reads(self, start: int, fed: int, last: bool) -> list[tuple[int, History, Want]]:
        want, seq = self.want, self.table.seq
        if want is None or (not last and (self.tree is not None or not self.every)):
            return []
        if self.tree is not None:
            return self._tree_reads(self.tree, want, fed)
        if not self.every:
            return [(fed - 1, History(seq, self.extra), want)]
        return [
            (index - start, History(seq, self.extra[: index - len(seq) + 1]), want)
            for index in range(max(self.first_read, start), start + fed)
        ]

    def _tree_reads(self, tree: DraftTree, want: Want, fed: int) -> list[tuple[int, History, Want]]:
        seq, first = self.table.seq, fed - self.num_nodes
        nodes = [
            (first + i, History(seq, tuple(tree.tokens[node] for node in tree.path(i))), want)
            for i in range(self.first_node, len(tree))
        ]
        if self.grows:
            return nodes
        extra = [(index, History(seq, free=True), self.want_extra) for index in range(first + len(tree), fed)]
        return [(first - 1, History(seq), want), *nodes, *extra]

    def keep_traces(self, feed: Feed, rows: list[Row]) -> None:
        """Gather what `Want.before` asks for, and give it to the first row; the cache is as before the forward."""
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

    def meter(self, feed: Feed, name: str, num_parameters: int, num_layers: int) -> None:
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
        if feed.depth != WHOLE:
            meter.spared_tokens += fed * (1 - feed.depth.runs(num_layers) / num_layers)
        if feed.partial is not None:
            meter.spared_tokens += feed.partial.spared
        meter.cached_tokens = table.cached_on_arrival
        meter.fetched_tokens = table.origin.on_arrival
