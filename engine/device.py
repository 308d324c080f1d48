"""A device: one worker thread, one forward at a time, shared by the models that live on it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch

from decoding.sequence import Sequence
from engine.cache.table import BlockTable
from engine.costs.forward import StepTime
from engine.scheduler.coscheduling import Arrivals, Prospect, waits_for_company
from engine.scheduler.fair_time import FairShare
from engine.scheduler.policy import Limits, Load
from engine.scheduler.priority import Floor
from engine.threads import Fed, Threads

T = TypeVar("T")
LATELY_S = 5.0


class Member(Protocol):
    """A model's queue, as the others on its device see it.

    Attributes:
        limits: what its steps may hold.
        times: predicts how long they take; None: nobody knows.
        went_at_s: the device's `spent_s` at the end of its last step.
        held_at_s: the device's `spent_s` when its step began to wait for company; None: it does not.
        stuck: whether its last turn came to nothing.
        tables: caches of the sequences it works on.
        arrivals: requests that come over to it from the others.
    """

    limits: Limits
    times: StepTime | None
    went_at_s: float
    held_at_s: float | None
    stuck: bool
    tables: dict[Sequence, BlockTable]
    arrivals: Arrivals

    def tenants(self) -> set[str]:
        """Whose operations wait or run there."""
        ...

    def load(self) -> Load:
        """What waits there."""
        ...

    def has(self, patient: bool) -> bool:
        """Whether somebody waits there for an operation that is in no hurry, or for one that is."""
        ...

    def prospect(self, patient: bool, beside: Member) -> Prospect | None:
        """What its next step would cost; None: it has none, or nobody knows.

        Args:
            patient: with operations that are in no hurry, or with those that are.
            beside: requests that this model works on as well, and does not at the moment, move between the two.
        """
        ...

    def asked_for(self, seq: Sequence) -> bool:
        """Whether an operation on a sequence waits or runs there."""
        ...


class Device:
    """Serialises forwards of all models on one torch device; whoever asked first goes first.

    Args:
        name: torch device name.
        threads: decides how many CPU threads a forward uses; None: as many as torch is set to.

    Attributes:
        clock: seconds.
        turn: held by whose forward is being planned or runs.
        changed: set when an operation has come, gone or run.
        members: queues of the models that live here.
        owed: what the tenants of these models are owed of the device's time.
        floor: what operations in no hurry get of it in any case.
        spent_s: time of all forwards so far, by their forecasts, in seconds.
    """

    def __init__(self, name: str, threads: Threads | None = None) -> None:
        self.threads = threads
        self.clock: Callable[[], float] = time.monotonic
        self._hurried_at = -math.inf
        self.torch_device = torch.device(name)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"forward-{name}")
        self.turn = asyncio.Lock()
        self.changed = asyncio.Event()
        self.members: list[Member] = []
        self.owed = FairShare()
        self.floor = Floor()
        self.spent_s = 0.0
        self._since: float | None = None
        self._last: dict[Sequence, Member] = {}  # which of them was asked last to go on with a sequence

    @property
    def working_s(self) -> float:
        """How long the thread has been at its present work, in seconds; 0.0: it has none."""
        since = self._since
        return time.monotonic() - since if since is not None else 0.0

    @property
    def patient(self) -> bool:
        """Whether operations in no hurry may be in the next step: nobody waits for others, or it is their turn."""
        return not self._has(patient=False) or (self.floor.due and self._has(patient=True))

    @property
    def hurried(self) -> bool:
        """Whether operations in a hurry were here lately: more of them may come any moment."""
        return self.clock() < self._hurried_at + LATELY_S

    def took(self, patient: bool, seconds: float) -> None:
        """Account for a step: of operations in no hurry alone, or of others."""
        if not patient:
            self._hurried_at = self.clock()
        if self.floor.share and self._has(patient=True) and self._has(patient=False):
            self.floor.took(patient, seconds)

    def threads_for(self, model: str, fed: Fed) -> int | None:
        """CPU threads of a model's next forward, which is fed so much; None: as many as torch is set to."""
        return self.threads.of(model, fed) if self.threads is not None else None

    def ran(self, model: str, fed: Fed, work_s: float | None, seconds: float) -> None:
        """Learn from a forward about threads; see `Threads.took`."""
        if self.threads is not None:
            self.threads.took(model, fed, work_s, seconds)

    def forgo(self) -> bool:
        """Give up the turn of operations in no hurry, none of which can run; False: nobody else waits for it."""
        if not (self.floor.due and self._has(patient=False)):
            return False
        self.floor.forgo()
        return True

    def _has(self, patient: bool) -> bool:
        return any(member.has(patient) for member in self.members)

    def tenants(self) -> set[str]:
        """Whose operations wait on any of the models, of those whose turn is next."""
        return set().union(*(member.tenants() for member in self.members))

    def others_first(self, member: Member) -> bool:
        """Whether a tenant that waits for another model only is owed time, and more of it than who waits for this one.

        Who runs here is not held back for longer than prompts may make them wait.

        Args:
            member: whose step would be next.
        """
        mine = max(map(self.owed.balance, member.tenants()), default=0.0)
        if not any(self.owed.balance(tenant) > max(mine, 0.0) for tenant in self.tenants()):
            return False
        running = sum(sum(each.load().running.values()) for each in self.members)
        bears_s = (member.limits.max_slowdown - 1.0) * running
        return not member.load().running or self.spent_s - member.went_at_s < bears_s

    def came(self, member: Member, seq: Sequence) -> None:
        """A member is asked to go on with a sequence."""
        before = self._last.get(seq)
        self._last[seq] = member
        if before is not None and before is not member:
            member.arrivals.came()

    def passed(self, member: Member, rows: int) -> None:
        """A member ran a step of so many operations."""
        for each in self.members:
            if each is not member:
                each.arrivals.passed(rows)

    def forget(self, seq: Sequence) -> None:
        """A member has given a sequence back."""
        self._last.pop(seq, None)

    def holds(self, member: Member) -> bool:
        """Whether a member's step waits while another model's is run; see `engine.scheduler.coscheduling`."""
        patient = self.patient
        since = self.spent_s if member.held_at_s is None else member.held_at_s
        held = any(
            self._goes_first(each, member, patient, self.spent_s - since)
            for each in self.members
            if each is not member and not each.stuck and each.has(patient)
        )
        member.held_at_s = since if held else None
        return held

    def _goes_first(self, other: Member, member: Member, patient: bool, held_s: float) -> bool:
        coming = other.prospect(patient, member)
        if coming is None or not coming.moving:
            return False
        mine = member.prospect(patient, other)
        return mine is not None and waits_for_company(mine, coming, member.arrivals.a_row, held_s, member.limits)

    async def change(self) -> None:
        """Wait until an operation has come, gone or run."""
        self.changed.clear()
        await self.changed.wait()

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run `work` on the device's thread. The caller holds `turn`."""
        return asyncio.get_running_loop().run_in_executor(self._executor, lambda: self._work(work))

    def _work(self, work: Callable[[], T]) -> T:
        self._since = time.monotonic()
        try:
            return work()
        finally:
            self._since = None

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread between forwards and wait for it; called from any thread but the event loop's."""
        return self._executor.submit(work).result()

    async def between(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread between two forwards; whoever gives up waiting does not end it before its end."""
        async with self.turn:
            return await to_its_end(self.run(work))

    def close(self) -> None:
        """End the thread after the forward in progress."""
        self._executor.shutdown(wait=True)


async def to_its_end(running: asyncio.Future[T]) -> T:
    """Wait until it has ended, cancelled or not: blocks that are being written to must not be given away."""
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
