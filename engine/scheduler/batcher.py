"""Continuous batching: whatever methods await on a model runs together in the next forward pass."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence as Works

from decoding.model import Row
from decoding.partial_forward import WHOLE
from decoding.sequence import Sequence
from engine.cache.table import BlockTable
from engine.costs.forward import Forward, StepTime
from engine.device import Device, Member
from engine.executor import Forwards, Outcome
from engine.runner import Runner
from engine.scheduler.coscheduling import Arrivals, Prospect, prospect_of
from engine.scheduler.policy import Limits, Load, is_decode, load_of
from engine.scheduler.queue import WaitingWork
from engine.scheduler.queued_operation import Work
from engine.scheduler.step_builder import Planner, Steps
from engine.threads import Fed
from engine.tracing import forward_span
from turnout.errors import Code, TurnoutError
from turnout.tracing import end

log = logging.getLogger(__name__)


class Batcher:
    """Collects a model's pending operations and runs them step by step.

    Args:
        name: the model's name, for the meter.
        num_parameters: its parameters.
        runner: executes forwards.
        device: whose turn it must be, and whose time tenants share.
        limits: what a step may hold.
        times: predicts how long a step takes, and is told how long it took; None bounds steps by tokens only.

    Attributes:
        tables: the caches of the sequences the model works on.
        step_seconds: recent time of a step of single tokens, in seconds.
        reading_s: see `decoding.speculation.RunsHere.reading_seconds`.
        went_at_s: the device's `spent_s` at the end of its last step.
        held_at_s: the device's `spent_s` when the next step began to wait for company; None: it does not.
        stuck: whether the last turn came to nothing.
        arrivals: requests that come over from other models of the device.
    """

    def __init__(
        self,
        name: str,
        num_parameters: int,
        runner: Runner,
        device: Device,
        limits: Limits,
        times: StepTime | None = None,
    ) -> None:
        self.name = name
        self.num_parameters = num_parameters
        self.device = device
        self.limits = limits
        self.times = times
        self.tables: dict[Sequence, BlockTable] = {}
        self.step_seconds = self.reading_s = 0.0
        self._forwards = Forwards(runner, device)
        self._waiting = WaitingWork()
        self._planner = Planner(self, self._waiting, device)
        self._loop: asyncio.Task[None] | None = None
        self.went_at_s = 0.0
        self.held_at_s: float | None = None
        self.stuck = False
        self.arrivals = Arrivals()
        device.members.append(self)

    @property
    def runner(self) -> Runner:
        """Executes the forwards."""
        return self._forwards.runner

    def use(self, runner: Runner) -> None:
        """Let another runner execute the forwards from the next step on."""
        self._forwards.runner = runner

    @property
    def forward_seconds(self) -> float:
        """Time spent in forward passes so far, in seconds."""
        return self._forwards.seconds

    @property
    def num_waiting(self) -> int:
        """Operations waiting for a forward."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that those in a hurry still have to feed, as far as is known without a look at the cache."""
        return sum(max(work.total - work.cached, 1) for work in self._waiting.of(patient=False))

    def has(self, patient: bool) -> bool:
        """Whether somebody waits for an operation that is in no hurry, or for one that is."""
        return self._waiting.has(patient)

    def tenants(self) -> set[str]:
        """Whose operations wait or run, of those whose turn on the device is next."""
        return self._waiting.tenants(self.device.patient)

    def load(self) -> Load:
        """What waits, in the eyes of other models on the device."""
        works = self._waiting.unblocked(self.device.patient) if self.times is not None else ()
        return load_of(works, self.limits, self.times)

    def prospect(self, patient: bool, beside: Member) -> Prospect | None:
        """See `engine.device.Member.prospect`."""
        if self.times is None:
            return None
        known, busy = beside.tables, beside.asked_for

        def moves(work: Work) -> bool:
            seq = work.table.seq
            return seq in known and not busy(seq)

        return prospect_of(self._waiting.unblocked(patient), self.limits, self.times, moves)

    def asked_for(self, seq: Sequence) -> bool:
        """Whether an operation on a sequence waits or runs here."""
        return self._waiting.has_any(seq)

    async def submit(self, work: Work) -> list[Row]:
        """Queue an operation and wait for its rows.

        Raises:
            TurnoutError: RESOURCE_EXHAUSTED when the sequence alone does not fit into the block pool, CANCELLED
                when the sequence is released meanwhile.
        """
        table = work.table
        _check_fits(work, self.name)
        self._waiting.add(work)
        if not work.background:
            self.device.came(self, table.seq)
        self.device.changed.set()
        if self._loop is None or self._loop.done():
            self._loop = asyncio.get_running_loop().create_task(self._run(), name=f"batcher-{self.name}")
        try:
            rows = await work.future
        finally:
            if work in self._waiting:  # whoever waited gave up
                self._waiting.discard(work)
                self.device.changed.set()
        if table.released:
            raise _released()
        return rows

    def release(self, table: BlockTable) -> None:
        """Give back a sequence's blocks: now, or when the forward that uses them ends. What waits for it fails."""
        table.released = True
        self.device.forget(table.seq)
        for work in [work for work in self._waiting if work.table is table]:
            self._waiting.refuse(work, _released())
        if not table.in_flight:
            table.drop()
        self.device.changed.set()

    async def close(self) -> None:
        """Stop the loop; pending operations are cancelled."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        self._waiting.cancel_all()
        if self in self.device.members:
            self.device.members.remove(self)

    async def _run(self) -> None:
        while self._waiting:
            await asyncio.sleep(
                0
            )  # whoever waited for company until now goes before the next step that would be company
            if self.device.holds(self):
                await self.device.change()
                continue
            async with self.device.turn:
                # Let everyone whose result just arrived ask for the next one, so that they share a forward.
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                steps: Steps = []
                num_waiting = len(self._waiting)
                try:
                    steps = self._planner.plan()
                    if steps:
                        await self._step(steps)
                except Exception as error:
                    # A fault outside the forward: nobody may be left waiting for a loop that has died.
                    log.exception("batching of %s failed", self.name)
                    for work in list(self._waiting):
                        self._waiting.refuse(work, error)
                finally:
                    _land(steps)
            self.stuck = not steps
            self.device.changed.set()
            if not steps and self._waiting and len(self._waiting) == num_waiting:
                await self.device.change()

    async def _step(self, steps: Steps) -> None:
        """Run one forward, learn its cost, and hand out its rows; a forward that fails fails only who caused it."""
        feeds = [feed for _, feed in steps]
        for feed in feeds:
            feed.table.in_flight = True
        outcomes: Works[Outcome]
        span = forward_span(self.name, steps)
        try:
            outcomes, seconds = await self._forwards.run(feeds, self.device.threads_for(self.name, _fed(steps)))
        except Exception as error:
            end(span, type(error).__name__)
            log.exception("forward pass of %s failed", self.name)
            outcomes = await self._forwards.run_each(feeds) if len(feeds) > 1 else [error]
        else:
            end(span)
            self._learn(steps, seconds)
        self._resolve(steps, outcomes)

    def _learn(self, steps: Steps, seconds: float) -> None:
        """Keep the recent step time, the cost model, and what tenants are owed up to date."""
        self.device.took(all(work.patient for work, _ in steps), seconds)
        if all(len(feed.tokens) == 1 and feed.depth == WHOLE for _, feed in steps):
            self.step_seconds = seconds if not self.step_seconds else 0.9 * self.step_seconds + 0.1 * seconds
        self.device.passed(self, len(steps))
        if self.times is None or any(feed.depth != WHOLE for _, feed in steps):
            self.device.ran(self.name, _fed(steps), None, seconds)
            self.went_at_s = self.device.spent_s = self.device.spent_s + seconds
            return
        whole = _forward_of(steps)
        self.reading_s += _reading_seconds(steps, seconds, self.times)
        self.device.ran(self.name, _fed(steps), whole.seconds(self.times), seconds)
        self.went_at_s = self.device.spent_s = self.device.spent_s + whole.seconds(self.times)
        active = self.device.tenants()
        got = _seconds_by_tenant(steps, self.times) if len(active) > 1 else {}
        self.device.owed.charge(got, active, whole.seconds(self.times) if got else 0.0)
        if not any(feed.partial is not None and (len(feed.partial.given) or feed.partial.again) for _, feed in steps):
            self.times.observe(whole.fed, whole.attended, whole.sequences, seconds)

    def _resolve(self, steps: Steps, outcomes: Works[Outcome]) -> None:
        """Enter what was computed into the caches, and wake who has all of its rows."""
        for (work, feed), outcome in zip(steps, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self._waiting.refuse(work, outcome)
                continue
            work.meter(feed, self.name, self.num_parameters, self.runner.plan.num_layers)
            work.keep_traces(feed, outcome)
            work.enter(feed, self.runner.plan.keeps_trees)
            if len(feed.tokens) < work.remaining:
                work.rows.extend(outcome)
            elif work.on_row is None:
                self._waiting.finish(work, [*work.rows, *outcome])
            else:
                self._hand_over(work, outcome[0])

    def _hand_over(self, work: Work, row: Row) -> None:
        """Let a stretch of decoding take its next token; it goes on from the end of the queue."""
        assert work.on_row is not None
        if work.future.done() or work.table.released:
            self._waiting.finish(work, [])
            return
        try:
            if not work.on_row(row):
                self._waiting.finish(work, [])
                return
            _check_fits(work, self.name)
        except Exception as error:
            self._waiting.refuse(work, error)
        else:
            self._waiting.renew(work)


def _forward_of(steps: Steps) -> Forward:
    whole = Forward()
    for _, feed in steps:
        whole.add(len(feed.table), len(feed.tokens))
    return whole


def _reading_seconds(steps: Steps, seconds: float, times: StepTime) -> float:
    """By how much a step that took so long is longer than one with its decodes alone would have been."""
    decodes = [(work, feed) for work, feed in steps if is_decode(work)]
    if len(decodes) == len(steps):
        return 0.0
    return max(seconds - _forward_of(decodes).seconds(times), 0.0)


def _fed(steps: Steps) -> Fed:
    return Fed(len(steps), sum(len(feed.tokens) for _, feed in steps))


def _land(steps: Steps) -> None:
    """Nothing uses the step's caches any more."""
    for _, feed in steps:
        feed.table.in_flight = False
        if feed.partial is not None:
            feed.partial.let_go()
        if feed.table.released:
            feed.table.drop()


def _seconds_by_tenant(steps: Steps, times: StepTime) -> dict[str, float]:
    """What was fed for each tenant would have taken so long in a step of its own.

    Of whom nothing was fed but parts of prompts, what they add to a step: alone, they would be read in fewer steps.
    """
    forwards = defaultdict[str, Forward](Forward)
    whole = set()
    for work, feed in steps:
        forwards[work.tenant].add(len(feed.table), len(feed.tokens))
        if len(feed.tokens) == work.remaining:
            whole.add(work.tenant)
    least = times.seconds(1, 1, 1)
    return {
        tenant: forward.seconds(times) - (0.0 if tenant in whole else least) for tenant, forward in forwards.items()
    }


def _check_fits(work: Work, name: str) -> None:
    pool = work.table.pool
    limit = pool.num_blocks * pool.block_size
    if work.total > limit:
        message = f"a sequence of {work.total} tokens does not fit the KV cache of {name} ({limit} tokens)"
        raise TurnoutError(Code.OUT_OF_RANGE, message)


def _released() -> TurnoutError:
    return TurnoutError(Code.CANCELLED, "the sequence was released while its model worked on it")
