"""Device: one worker thread, one forward at a time, and the turns of the models that share it."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import torch

from decoding.sequence import Sequence
from engine.scheduler.coscheduling import should_wait
from engine.scheduler.fairness import FairShare, MinimumShare
from engine.scheduler.limits import DeviceState
from engine.scheduler.queue import Deliveries
from engine.threads import Fed, Threads
from engine.worker_thread import WorkerThread

if TYPE_CHECKING:
    from engine.scheduler.batcher import Batcher

T = TypeVar("T")
RECENT_S = 5.0


class Device:
    """One torch device: runs forwards of its models one after the other, each model in its turn.

    Args:
        name: torch device name.
        threads: chooses the number of CPU threads of a forward; None: torch's setting.

    Attributes:
        clock: current time, in seconds.
        turn: lock held while a forward is planned and runs, and by other work on the thread.
        fixed_turn: lock held by the one forward of a fixed shape that waits for the turn: a step runs between two.
        members: batchers of the device's models, in the order in which they ask for turns.
        deliveries: results handed out to methods that have not resumed.
        owed: balances of the tenants of these models.
        minimum_share: of low-priority operations.
        spent_s: predicted time of all forwards so far, in seconds.
    """

    def __init__(self, name: str, threads: Threads | None = None) -> None:
        self.threads = threads
        self.clock: Callable[[], float] = time.monotonic
        self.torch_device = torch.device(name)
        self.turn = asyncio.Lock()
        self.fixed_turn = asyncio.Lock()
        self.members: list[Batcher] = []
        self.deliveries = Deliveries()
        self.owed = FairShare()
        self.minimum_share = MinimumShare()
        self.spent_s = 0.0
        self._thread = WorkerThread(f"forward-{name}")
        self._wanting = 0  # that wait for the turn while steps may follow each other
        self._interactive_at = -math.inf
        self._last: dict[Sequence, Batcher] = {}  # the model that got a sequence's latest operation
        self._ready: deque[Batcher] = deque()  # models whose turn comes, in this order
        self._loop: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._arrived = False  # an operation was queued since `_drain_arrivals` looked

    @property
    def working_s(self) -> float:
        """How long the thread has been at its present work, in seconds; 0.0: it has none."""
        return self._thread.working_s

    @property
    def low_priority(self) -> bool:
        """Whether the next step may hold low-priority operations: no other waits, or their minimum share is due."""
        return not self._has(low_priority=False) or (self.minimum_share.due and self._has(low_priority=True))

    def _has(self, low_priority: bool) -> bool:
        return any(member.has(low_priority) for member in self.members)

    def charge(self, low_priority: bool, seconds: float) -> None:
        """Account for a step of a priority class."""
        if not low_priority:
            self._interactive_at = self.clock()
        if self.minimum_share.share and self._has(low_priority=True) and self._has(low_priority=False):
            self.minimum_share.charge(low_priority, seconds)

    def threads_for(self, model: str, fed: Fed) -> int | None:
        """Return the CPU threads of a model's next forward; None: torch's setting."""
        return self.threads.of(model, fed) if self.threads is not None else None

    def ran(self, model: str, fed: Fed, work_s: float | None, seconds: float, forwards: int) -> None:
        """Learn the best number of threads from forwards; see `Threads.took`."""
        if self.threads is not None:
            self.threads.took(model, fed, work_s, seconds, forwards)

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """Hold the turn: no step runs meanwhile. Steps that follow each other end for it."""
        self._wanting += 1
        try:
            await self.turn.acquire()
        finally:
            self._wanting -= 1
        try:
            yield
        finally:
            self.turn.release()

    def has_changed(self) -> bool:
        """Return whether anything changed since the step in progress was planned, or something else waits for a turn.

        Called on the thread, before another forward of the same step.
        """
        self._thread.note_working()
        return self._changed.is_set() or self._wanting > 0 or self._thread.has_waiting

    def tenants(self) -> set[str]:
        """Return the tenants with operations of the priority class whose turn is next, on any of the models."""
        return set().union(*(member.tenants() for member in self.members))

    def note_operation(self, member: Batcher, seq: Sequence) -> None:
        """Note that an operation on a sequence was queued: it moved here if another model had the latest one."""
        before = self._last.get(seq)
        self._last[seq] = member
        if before is not None and before is not member:
            member.transfers.arrived()

    def note_step(self, member: Batcher, rows: int) -> None:
        """Note that a model ran a step with `rows` operations."""
        for each in self.members:
            if each is not member:
                each.transfers.ran(rows)

    def forget(self, seq: Sequence) -> None:
        """Drop what is known of a released sequence."""
        self._last.pop(seq, None)

    def wake(self, member: Batcher) -> None:
        """Run steps until no operations wait; called when a member has a new operation."""
        self._arrived = True
        if member.num_waiting == 1:
            self._ask_last(member)
        loop = asyncio.get_running_loop()
        if self._loop is None or self._loop.get_loop() is not loop:
            self._ready.clear()
            self.deliveries.clear()
            self._changed = asyncio.Event()
            self._loop = None
        if self._loop is None or self._loop.done():
            self._loop = loop.create_task(self._run(), name=f"device-{self.torch_device}")
        self.notify()

    def notify(self) -> None:
        """Note a change by which a model may run that could not: an operation, memory, a step."""
        self._changed.set()

    def _ask_last(self, member: Batcher) -> None:
        """Put a model behind those that wait for longer."""
        if member in self.members:
            self.members.remove(member)
        self.members.append(member)

    async def leave(self, member: Batcher) -> None:
        """Remove a model that has no more operations, if it is here; return when no forward of it runs."""
        for waiting in (self.members, self._ready):
            if member in waiting:
                waiting.remove(member)
        self.notify()
        loop = self._loop
        if loop is None or loop.done() or loop.get_loop() is not asyncio.get_running_loop():
            return
        async with self.quiet():  # a forward of it has ended
            pass
        if not self.members:
            await asyncio.wait([loop])

    async def _run(self) -> None:
        """Run one step after the other until no operations wait."""
        while True:
            await self._drain_arrivals()
            async with self.turn:
                self._changed.clear()
                try:
                    ran = await self._next_step()
                except Exception as error:  # outside of any step: no method may wait for a loop that has ended
                    ran = True
                    for member in self.members:
                        member.fail(error)
            if not any(member.num_waiting for member in self.members):
                return
            if not ran:
                await self._changed.wait()

    async def _drain_arrivals(self) -> None:
        """Wait until methods that were handed results run again, and operations that arrive together are queued."""
        await self.deliveries.all_resumed()
        while self._arrived:
            self._arrived = False
            await asyncio.sleep(0)  # until a pass of the event loop brings no new operation

    async def _next_step(self) -> bool:
        """Run the next step, of the model that asked first; False: none can run before something changes.

        A model yields to tenants of other models only while these models can run.
        """
        return await self._step_of_one(yielding=True) or await self._step_of_one(yielding=False)

    async def _step_of_one(self, yielding: bool) -> bool:
        stuck: list[Batcher] = []
        while True:
            for member in self.members:
                if member.num_waiting and member not in (*self._ready, *stuck) and not self.is_delayed(member):
                    self._ready.append(member)
            if not self._ready:
                return False
            member = self._ready.popleft()
            try:
                ran = await member.step(self._state_for(member, yielding))
            except Exception as error:
                member.fail(error)
                ran = True
            member.stuck = not ran
            if ran:
                if member in self.members:  # it may have left while its forward ran
                    self._ask_last(member)
                return True
            stuck.append(member)

    def _state_for(self, member: Batcher, yielding: bool) -> DeviceState:
        others = [each for each in self.members if each is not member]
        low_priority = self.low_priority
        return DeviceState(
            low_priority=low_priority,
            has_interactive_work=self.clock() < self._interactive_at + RECENT_S,
            may_forgo=low_priority and self._has(low_priority=False),
            tenants=frozenset().union(*(each.tenants() for each in others if yielding)),
            loads=tuple(each.load() for each in others),
            waited_s=self.spent_s - member.ran_until_s,
            alone=not any(each.num_waiting for each in others),
        )

    def is_delayed(self, member: Batcher) -> bool:
        """Return whether a model's step waits while another one's runs; see `engine.scheduler.coscheduling`."""
        low_priority = self.low_priority
        since = self.spent_s if member.delayed_since_s is None else member.delayed_since_s
        delayed = any(
            self._goes_first(each, member, low_priority, self.spent_s - since)
            for each in self.members
            if each is not member and not each.stuck and each.has(low_priority)
        )
        member.delayed_since_s = since if delayed else None
        return delayed

    def _goes_first(self, other: Batcher, member: Batcher, low_priority: bool, delayed_s: float) -> bool:
        coming = other.forecast(low_priority, member)
        if coming is None or not coming.moving:
            return False
        mine = member.forecast(low_priority, other)
        return mine is not None and should_wait(mine, coming, member.transfers.per_row, delayed_s, member.limits)

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run `work` on the device's thread. The caller holds `turn`."""
        return self._thread.run(work)

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread between forwards and wait for it; called from any thread but the event loop's."""
        return self._thread.call(work)

    async def between(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread between two forwards; a cancelled caller still waits for its end."""
        async with self.quiet():
            return await to_its_end(self.run(work))

    def close(self) -> None:
        """End the thread after the forward in progress."""
        self._thread.close()


async def to_its_end(running: asyncio.Future[T]) -> T:
    """Wait until it has ended, even if cancelled: blocks that are being written to must not be freed."""
    cancelled = False
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        running.exception()
        raise asyncio.CancelledError
    return running.result()
