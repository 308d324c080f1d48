"""Continuous batching: whatever methods await on a model runs together in the next forward pass."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from dataclasses import dataclass, field
from itertools import count

from decoding.logits import History
from decoding.model import Row, Want
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from engine.cache.blocks import OutOfBlocksError
from engine.cache.table import BlockTable
from engine.device import Device
from engine.runner import Feed, Runner
from engine.scheduler import plan_step
from turnout.errors import Code, TurnoutError

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Work:
    """One awaited operation: bring the cache up to the sequence plus `extra`, and read rows.

    Attributes:
        table: whose cache.
        extra: hypothetical tokens after the sequence (a draft path, a continuation to score).
        tree: a draft tree after the sequence; excludes `extra`.
        want: what to read; None reads nothing.
        every: read after the sequence's last token and after each of `extra`, not only after the last.
        background: fills leftover budget only, and stops before the sequence's last token.
    """

    table: BlockTable
    order: int
    future: asyncio.Future[list[Row]]
    extra: tuple[int, ...] = ()
    tree: DraftTree | None = None
    want: Want | None = None
    every: bool = False
    background: bool = False
    rows: list[Row] = field(default_factory=list)
    remaining: int = 0

    @property
    def atomic(self) -> int:
        """Tokens at the end that are fed together."""
        return 1 + len(self.tree) if self.tree is not None else 1

    @property
    def started(self) -> bool:
        """Whether part of the sequence is cached."""
        return len(self.table) > 0

    @property
    def target_length(self) -> int:
        """Cached length once this is done (tree nodes are not cached tokens)."""
        return len(self.table.seq) - 1 if self.background else len(self.table.seq) + len(self.extra)

    @property
    def first_read(self) -> int:
        """Index of the first token, of the sequence and `extra`, after which a row is still to be read."""
        return len(self.table.seq) - 1 + len(self.rows) if self.every else self.target_length - 1

    def refresh(self) -> None:
        """Recompute what is missing: caches may have been shared, shortened or preempted since."""
        table = self.table
        table.adopt_prefix()
        if self.background:
            table.reconcile()
            self.remaining = max(self.target_length - len(table), 0)
            return
        kept = table.reconcile(self.extra, compute_from=self.first_read)
        self.remaining = self.target_length - kept + (len(self.tree) if self.tree is not None else 0)

    def feed(self, count: int) -> Feed:
        """The next `count` of the remaining tokens, with the draft tree at their end, and what to read of them."""
        table, seq = self.table, self.table.seq
        start = len(table)
        tokens = seq.tokens[start : start + count]
        tokens += self.extra[max(start - len(seq), 0) :][: count - len(tokens)]
        last = count == self.remaining
        tree = self.tree if last else None
        if tree is not None:
            tokens += tree.tokens
        return Feed(table, tokens, tree, self._reads(start, len(tokens), last))

    def _reads(self, start: int, fed: int, last: bool) -> list[tuple[int, History, Want]]:
        want, seq, tree = self.want, self.table.seq, self.tree
        if want is None or (tree is not None and not last):
            return []
        if tree is not None:
            root = fed - len(tree) - 1
            paths = [(), *(tuple(tree.tokens[node] for node in tree.path(i)) for i in range(len(tree)))]
            return [(root + i, History(seq, path), want) for i, path in enumerate(paths)]
        return [
            (index - start, History(seq, self.extra[: index - len(seq) + 1]), want)
            for index in range(max(self.first_read, start), start + fed)
        ]


class Batcher:
    """Collects a model's pending operations and runs them step by step.

    Args:
        name: the model's name, for the meter.
        num_parameters: its parameters.
        runner: executes forwards.
        device: whose turn it must be.
        token_budget: tokens per forward.
        max_batch: operations per forward.
    """

    def __init__(
        self, name: str, num_parameters: int, runner: Runner, device: Device, token_budget: int, max_batch: int
    ) -> None:
        self.name = name
        self.num_parameters = num_parameters
        self.runner = runner
        self.device = device
        self.token_budget = token_budget
        self.max_batch = max_batch
        self.tables: dict[Sequence, BlockTable] = {}
        self.step_seconds = 0.0
        self._waiting: list[Work] = []
        self._order = count()
        self._loop: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """Operations waiting for a forward."""
        return len(self._waiting)

    async def submit(
        self,
        table: BlockTable,
        want: Want | None,
        extra: tuple[int, ...] = (),
        tree: DraftTree | None = None,
        every: bool = False,
        background: bool = False,
    ) -> list[Row]:
        """Queue an operation and wait for its rows.

        Raises:
            TurnoutError: RESOURCE_EXHAUSTED when the sequence alone does not fit into the block pool, CANCELLED
                when the sequence is released meanwhile.
        """
        pool = table.pool
        length = len(table.seq) + len(extra) + (len(tree) if tree is not None else 0)
        if -(-length // pool.block_size) > pool.num_blocks:
            limit = pool.num_blocks * pool.block_size
            message = f"a sequence of {length} tokens does not fit the KV cache of {self.name} ({limit} tokens)"
            raise TurnoutError(Code.RESOURCE_EXHAUSTED, message)
        future: asyncio.Future[list[Row]] = asyncio.get_running_loop().create_future()
        order = next(self._order)
        if table.arrival is None:
            table.arrival = order
        work = Work(table, order, future, extra, tree, want, every, background)
        self._waiting.append(work)
        self._wake.set()
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run(), name=f"batcher-{self.name}")
        try:
            rows = await future
        finally:
            if not future.done() or future.cancelled():
                self._forget(work)
        if table.released:
            raise _released()
        return rows

    def _forget(self, work: Work) -> None:
        if work in self._waiting:
            self._waiting.remove(work)
        self._wake.set()

    def release(self, table: BlockTable) -> None:
        """Give back a sequence's blocks: now, or when the forward that uses them ends. What waits for it fails."""
        table.released = True
        for work in self._waiting:
            if work.table is table:
                _refuse(work, _released())
        self._waiting = [work for work in self._waiting if work.table is not table]
        if not table.in_flight:
            table.drop()
        self._wake.set()

    async def close(self) -> None:
        """Stop the loop; pending operations are cancelled."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        for work in self._waiting:
            work.future.cancel()
        self._waiting.clear()

    async def _run(self) -> None:
        while self._waiting:
            async with self.device.turn:
                # Let everyone whose result just arrived ask for the next one, so that they share a forward.
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                steps: list[tuple[Work, Feed]] = []
                num_waiting = len(self._waiting)
                try:
                    steps = self._plan()
                    if steps:
                        await self._step(steps)
                except Exception as error:
                    # A fault outside the forward: nobody may be left waiting for a loop that has died.
                    log.exception("batching of %s failed", self.name)
                    self._land(steps)
                    for work in self._waiting:
                        _refuse(work, error)
                    self._waiting.clear()
            if not steps and self._waiting and len(self._waiting) == num_waiting:
                self._wake.clear()
                await self._wake.wait()

    def _plan(self) -> list[tuple[Work, Feed]]:
        """Choose the step's operations, reserve their memory, and lay out what each feeds."""
        candidates: list[Work] = []
        busy: set[int] = set()
        # What somebody waits for goes before background work on the same cache.
        for work in sorted((w for w in self._waiting if not w.future.done()), key=lambda w: w.background):
            if id(work.table) in busy:
                continue
            work.refresh()
            if work.remaining == 0:
                work.future.set_result(work.rows)
                continue
            busy.add(id(work.table))
            candidates.append(work)
        shares = plan_step(candidates, self.token_budget, self.max_batch)
        steps: list[tuple[Work, Feed]] = []
        settled: set[int] = set()  # caches that keep what they have in this step
        preempted: set[int] = set()
        for share in shares:
            work = candidates[share.index]
            if id(work.table) in preempted:
                continue
            if self._reserve(work, share.tokens, settled, preempted):
                settled.add(id(work.table))
                steps.append((work, work.feed(share.tokens)))
            elif work.background:
                work.future.set_result([])  # no room to read ahead: the cache stays short, which is never wrong
        self._waiting = [w for w in self._waiting if not w.future.done()]
        if not steps:
            stuck = [work for work in candidates if not work.background]
            steps = self._squeeze(min(stuck, key=_arrival)) if stuck else []
        return steps

    def _reserve(self, work: Work, tokens: int, settled: set[int], preempted: set[int]) -> bool:
        """Reserve blocks, preempting idle caches, then younger sequences; False: wait until some are free."""
        length = len(work.table) + tokens
        while True:
            try:
                work.table.reserve(length)
            except OutOfBlocksError:
                victim = None if work.background else self._victim(work, settled)
                if victim is None:
                    return False
                victim.drop()
                preempted.add(id(victim))
            else:
                return True

    def _victim(self, work: Work, settled: set[int]) -> BlockTable | None:
        """A cache to give up for `work`: idle ones first, then those of younger sequences; the youngest of them."""
        waiting = {id(w.table) for w in self._waiting if not w.background}
        held = [t for t in self.tables.values() if t.blocks and id(t) not in settled and t is not work.table]
        idle = [t for t in held if id(t) not in waiting]
        younger = [t for t in held if _age(t) > _age(work.table)]
        return max(idle or younger, key=_age, default=None)

    def _squeeze(self, work: Work) -> list[tuple[Work, Feed]]:
        """Nothing fitted: give the oldest sequence everything the others hold."""
        for table in self.tables.values():
            if table is not work.table:
                table.drop()
        work.refresh()
        tokens = min(work.remaining, max(self.token_budget, work.atomic))
        if work.remaining - tokens < work.atomic and tokens < work.remaining:
            tokens = work.remaining - work.atomic
        return [(work, work.feed(tokens))] if self._reserve(work, tokens, set(), set()) else []

    async def _step(self, steps: list[tuple[Work, Feed]]) -> None:
        feeds = [feed for _, feed in steps]
        for feed in feeds:
            feed.table.in_flight = True
        started = time.perf_counter()
        forward = asyncio.ensure_future(self.device.run(lambda: self.runner.run(feeds)))
        try:
            results = await asyncio.shield(forward)
        except asyncio.CancelledError:
            await asyncio.gather(forward, return_exceptions=True)
            self._land(steps)
            raise
        except Exception as error:
            log.exception("forward pass of %s failed", self.name)
            self._land(steps)
            for work, _ in steps:
                _refuse(work, error)
            return
        elapsed = time.perf_counter() - started
        if all(len(feed.tokens) == 1 for feed in feeds):
            self.step_seconds = elapsed if not self.step_seconds else 0.9 * self.step_seconds + 0.1 * elapsed
        self._resolve(steps, results)

    def _land(self, steps: list[tuple[Work, Feed]]) -> None:
        for _, feed in steps:
            feed.table.in_flight = False
            if feed.table.released:
                feed.table.drop()

    def _resolve(self, steps: list[tuple[Work, Feed]], results: list[list[Row]]) -> None:
        for (work, feed), rows in zip(steps, results, strict=True):
            self._count(work, feed)
            num_nodes = len(feed.tree) if feed.tree is not None else 0
            feed.table.filled(feed.tokens[: len(feed.tokens) - num_nodes])
            work.rows.extend(rows)
        self._land(steps)
        for work, feed in steps:
            done = feed.tree is not None or (work.tree is None and len(feed.table) >= work.target_length)
            if done and not work.future.done():
                work.future.set_result(work.rows)
        self._waiting = [w for w in self._waiting if not w.future.done()]

    def _count(self, work: Work, feed: Feed) -> None:
        """Put every fed token into one of the meter's classes."""
        seq, table = work.table.seq, work.table
        meter = seq.meter.of(self.name, self.num_parameters)
        start, fed = len(table), len(feed.tokens)
        prompt = max(min(seq.num_prompt_tokens - start, fed), 0)
        real = max(min(len(seq) - start, fed), 0)
        decode = 1 if not work.background and real > prompt and start + fed >= len(seq) else 0
        meter.forwards += 1
        meter.prompt_tokens += prompt
        meter.decode_tokens += decode
        meter.catchup_tokens += real - prompt - decode
        meter.draft_tokens += fed - real
        meter.cached_tokens = table.cached_on_arrival


def _refuse(work: Work, error: Exception) -> None:
    if not work.future.done():
        work.future.set_exception(error)


def _released() -> TurnoutError:
    return TurnoutError(Code.CANCELLED, "the sequence was released while its model worked on it")


def _age(table: BlockTable) -> int:
    """Order of first use; a table nobody has used yet (a fresh fork) is the youngest."""
    return table.arrival if table.arrival is not None else sys.maxsize


def _arrival(work: Work) -> int:
    return _age(work.table)
