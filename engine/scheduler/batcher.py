"""Continuous batching: operations that methods await on a model run together in its next forward."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager

from decoding.model import Readout
from decoding.sequence import Sequence
from engine.cache.table import BlockTable
from engine.costs.forward import StepTime
from engine.device import Device
from engine.executor import Forwards, Outcome
from engine.runner import Runner
from engine.scheduler.accounting import account
from engine.scheduler.coscheduling import StepForecast, TransferRate, forecast_step
from engine.scheduler.limits import DeviceState, Limits, Load, load_of
from engine.scheduler.metering import meter, meter_tokens
from engine.scheduler.policy import Policy
from engine.scheduler.queue import OperationQueue
from engine.scheduler.queued_operation import QueuedOperation
from engine.scheduler.step_builder import Step, StepBuilder
from engine.scheduler.token_run import TokenRun
from engine.tracing import forward_span
from turnout.errors import Code, TurnoutError
from turnout.tracing import end

log = logging.getLogger(__name__)


class Batcher:
    """Queue of a model's operations, and the steps that run them.

    Args:
        name: name of the model, for the meter.
        num_parameters: of the model.
        runner: executes forwards.
        device: gives the model its turns, and accounts for time.
        limits: limits of a step.
        times: predicts how long a step takes, and learns from each; None bounds steps by tokens only.

    Attributes:
        tables: caches of the sequences the model works on.
        step_seconds: recent time of a step of single tokens, in seconds.
        reading_s: see `decoding.speculation.RunsHere.reading_seconds`.
        ran_until_s: the device's `spent_s` at the end of its last step.
        delayed_since_s: the device's `spent_s` when the next step was first delayed for coscheduling; None: it is not.
        stuck: the last turn ran nothing.
        transfers: rate at which requests move here from other models of the device.
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
        self.ran_until_s = 0.0
        self.delayed_since_s: float | None = None
        self.stuck = False
        self.transfers = TransferRate()
        self._forwards = Forwards(runner, device)
        self._queue = OperationQueue(device.deliveries)
        self._builder = StepBuilder(self._queue, self.tables)
        device.members.append(self)

    @property
    def runner(self) -> Runner:
        """Executes the forwards."""
        return self._forwards.runner

    def use(self, runner: Runner) -> None:
        """Replace the runner from the next step on."""
        self._forwards.runner = runner

    @property
    def forward_seconds(self) -> float:
        """Time spent in forwards so far, in seconds."""
        return self._forwards.seconds

    @property
    def num_waiting(self) -> int:
        """Operations that wait for a forward or take part in one."""
        return len(self._queue)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that interactive operations still have to feed, as far as known without a look-up in the cache."""
        return sum(work.num_waiting_tokens for work in self._queue.of(low_priority=False))

    def has(self, low_priority: bool) -> bool:
        """Return whether a method waits for an operation of a priority class."""
        return self._queue.has(low_priority)

    def tenants(self) -> set[str]:
        """Return the tenants with operations of the priority class whose turn is next."""
        return self._queue.tenants(self.device.low_priority)

    def load(self) -> Load:
        """Return the load by operations of the priority class whose turn is next."""
        works = self._queue.unblocked(self.device.low_priority) if self.times is not None else ()
        return load_of(works, self.limits, self.times)

    def forecast(self, low_priority: bool, other: Batcher) -> StepForecast | None:
        """Forecast the next step; None: there is none, or its duration is unknown.

        Args:
            low_priority: priority class of the step.
            other: requests that this model works on as well, and does not at the moment, move between the two.
        """
        if self.times is None:
            return None
        known, busy = other.tables, other.has_operation

        def moves(work: QueuedOperation) -> bool:
            seq = work.table.seq
            return seq in known and not busy(seq)

        return forecast_step(self._queue.unblocked(low_priority), self.limits, self.times, moves)

    def has_operation(self, seq: Sequence) -> bool:
        """Return whether an operation on a sequence waits or runs here."""
        return self._queue.has_operation(seq)

    async def submit(self, work: QueuedOperation) -> list[Readout]:
        """Queue an operation and wait for its rows.

        Raises:
            TurnoutError: OUT_OF_RANGE when the sequence alone does not fit into the block pool, CANCELLED when the
                sequence is released meanwhile.
        """
        with self.queued(work):
            rows = await work.future
        if work.table.released:
            raise _released()
        return rows

    @contextmanager
    def queued(self, work: QueuedOperation) -> Iterator[None]:
        """Have an operation queued until it has ended, or is given up."""
        _check_fits(work, self.name)
        self._queue.add(work)
        if not work.background:
            self.device.note_operation(self, work.table.seq)
        self.device.wake(self)
        try:
            yield
        finally:
            self.device.deliveries.resumed(work.future)
            if work in self._queue:  # the method was cancelled
                work.future.cancel()
                self._queue.discard(work)
                self.device.notify()

    def release(self, table: BlockTable) -> None:
        """Free a sequence's blocks, at the latest when the forward that uses them ends; its operations fail."""
        table.released = True
        self.device.forget(table.seq)
        for work in self._queue.on(table):
            self._queue.fail(work, _released())
        if not table.in_flight:
            table.drop()
        self.device.notify()

    async def close(self) -> None:
        """Cancel all operations; return when no forward of the model runs."""
        self._queue.cancel_all()
        await self.device.leave(self)

    async def step(self, device: DeviceState) -> bool:
        """Run one forward: plan what it feeds, compute it, apply what came out. False: nothing can run now."""
        policy = Policy(self.limits, self.times, self.device.owed)
        with self._builder.plan(policy, device) as step:
            if step.run is not None:
                await self._follow(step, step.run)
            elif step.parts:
                self._apply(step, await self._run(step))
        if step.forgone:
            self.device.minimum_share.forgo()
        return step.progresses

    def fail(self, error: Exception) -> None:
        """Fail all operations: an error outside a forward must not leave methods waiting."""
        log.error("batching of %s failed", self.name, exc_info=error)
        for work in list(self._queue):
            self._queue.fail(work, error)

    async def _run(self, step: Step) -> Items[Outcome]:
        """Compute a step; if its forward fails, compute each part alone, so that only its cause fails."""
        feeds = step.feeds
        span = forward_span(self.name, step.parts)
        try:
            outcomes, seconds = await self._forwards.run(feeds, self.device.threads_for(self.name, step.fed))
        except Exception as error:
            end(span, type(error).__name__)
            log.exception("forward pass of %s failed", self.name)
            return await self._forwards.run_each(feeds) if len(feeds) > 1 else [error]
        end(span)
        self._account(step, seconds)
        return outcomes

    async def _follow(self, step: Step, run: TokenRun) -> None:
        """Compute a step and, until something changes, those like it that follow it; hand out what comes out."""
        await self._forwards.follow(run, lambda: self._take(run), self.device.threads_for(self.name, step.fed))
        if run.seconds:
            self._account(step, sum(run.seconds))
        self._take(run)
        self._enter(run)
        if run.error is not None:  # a step that is planned says whose fault it is
            log.error("forward pass of %s failed", self.name, exc_info=run.error)
            self._builder.plan_next()

    def _account(self, step: Step, seconds: float) -> None:
        account(self, step, seconds)

    def _apply(self, step: Step, outcomes: Items[Outcome]) -> None:
        """Enter what was computed into the caches, and hand out the rows of operations that have all of them."""
        plan = self.runner.plan
        for (work, feed), outcome in zip(step.parts, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self._queue.fail(work, outcome)
                continue
            if feed is work.repeated:
                meter_tokens(work, 1, self.name, self.num_parameters)
                work.table.filled(feed.tokens)
                self._continue_decoding(work, outcome[0])
                continue
            meter(work, feed, self.name, self.num_parameters, plan.num_layers)
            work.keep_traces(feed, outcome)
            work.keep_mean(feed, outcome)
            work.enter(feed, plan.keeps_trees)
            if len(feed.tokens) < work.remaining:
                work.rows.extend(outcome)
            elif work.loop is None:
                self._queue.finish(work, [*work.rows, *outcome])
            else:
                self._continue_decoding(work, outcome[0])

    def _take(self, run: TokenRun) -> None:
        """Hand out what has come out of a run; it may go on meanwhile."""
        run.take(self.name, self.num_parameters)

    def _enter(self, run: TokenRun) -> None:
        """Enter into the caches what a run has computed, and finish the operations that get no more of it."""
        run.enter()
        ended = run.ended
        for place, work in enumerate(run.works):
            if place in run.faults:
                self._queue.fail(work, run.faults[place])
            elif place in ended:
                self._queue.finish(work, [])
            else:
                _requeue(self._queue, work, self.name)

    def _continue_decoding(self, work: QueuedOperation, row: Readout) -> None:
        """Give a decode loop its next token; unless it ends, it waits for another at the end of the queue."""
        assert work.loop is not None
        if work.future.done() or work.table.released:
            self._queue.finish(work, [])
            return
        try:
            continues = work.loop.take(row)
        except Exception as error:
            self._queue.fail(work, error)
            return
        if not continues:
            self._queue.finish(work, [])
            return
        work.loop.announce()
        _requeue(self._queue, work, self.name)


def _requeue(queue: OperationQueue, work: QueuedOperation, name: str) -> None:
    """Let a decode loop wait for its next token at the end of the queue."""
    try:
        _check_fits(work, name)
    except Exception as error:
        queue.fail(work, error)
    else:
        queue.requeue(work)


def _check_fits(work: QueuedOperation, name: str) -> None:
    limit, total = work.table.pool.num_slots, work.total
    if total > limit:
        message = f"a sequence of {total} tokens does not fit the KV cache of {name} ({limit} tokens)"
        raise TurnoutError(Code.OUT_OF_RANGE, message)


def _released() -> TurnoutError:
    return TurnoutError(Code.CANCELLED, "the sequence was released while its model worked on it")
