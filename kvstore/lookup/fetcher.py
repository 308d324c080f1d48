"""One look-up, within a fixed time: host memory, Redis, then a short wait for a process that computes the rest."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import TypeVar

import torch

from kvstore.base import StoreFault
from kvstore.keys import Link
from kvstore.lookup.admission import Doorkeeper
from kvstore.lookup.controller import Decision, LookupGate, regret
from kvstore.lookup.locks import ComputeLocks
from kvstore.lookup.memory import EXACT, HostMemory
from kvstore.lookup.reader import ReadContext, Run
from kvstore.lookup.single_flight import SingleFlight, Slot, Wake
from kvstore.types import Found, Tier, Wanted

log = logging.getLogger(__name__)
T = TypeVar("T")

PASSES = 3  # times that a read which another request began and left is taken over
# Longest wait for another process's next chunk: this part of the time to compute the rest, or this number of steps.
PATIENCE = 0.3
STEPS = 2.0
LEAST_POLL_S, MOST_POLL_S = 0.002, 0.02
LOCK_WAIT_S = 0.1
LOCK_WORTH = 0.02  # of the time to compute the rest may be spent on asking for the lock


class _LookUp:
    """State of one look-up."""

    def __init__(self, wanted: Wanted, links: list[Link], deadline: float, chunk_tokens: int) -> None:
        self.wanted = wanted
        self.links = links
        self.deadline = deadline
        self.chunk_tokens = chunk_tokens
        self.got: list[tuple[torch.Tensor, str, Tier] | None] = [None] * len(links)
        self.decision: Decision | None = None
        self.fault = False
        self.absent = False  # the first chunk that is missing is not in the store
        self.wake = Wake()

    @property
    def hole(self) -> int:
        """Place of the first chunk that is missing."""
        return next((place for place, each in enumerate(self.got) if each is None), len(self.got))

    def usable(self, residual_tokens: int) -> list[tuple[torch.Tensor, str, Tier]]:
        """List the chunks that came without a gap, without lossy ones in the last `residual_tokens` of the prompt.

        What comes next attends to these most: paper #12 keeps the newest tokens in full precision.
        """
        last = len(self.wanted.tokens) - residual_tokens
        first = self.wanted.held // self.chunk_tokens
        found = []
        for place, each in enumerate(self.got, start=first + 1):
            if each is None or (each[1] != EXACT and place * self.chunk_tokens > last):
                break
            found.append(each)
        return found

    def rest_s(self, place: int) -> float:
        """Predict the seconds to compute everything from the chunk at `place` on."""
        start, end = self._start(place), len(self.wanted.tokens)
        return self.wanted.seconds(start, end) if start < end else 0.0

    def step_s(self, place: int) -> float:
        """Predict the seconds of the forward that computes the chunk at `place`."""
        start = self._start(place)
        end = min(start + self.wanted.step, len(self.wanted.tokens))
        return self.wanted.seconds(start, end) if start < end else 0.0

    def _start(self, place: int) -> int:
        wanted = self.wanted
        return max(wanted.held, (wanted.held // self.chunk_tokens + place) * self.chunk_tokens)


class Fetcher:
    """Look-ups for sequences of one model.

    Args:
        memory: the host tier.
        context: for reading from Redis; None: there is none.
        readers: threads that do I/O.
        locks: of this process; None: there is no Redis.
        doorkeeper: says which chunks would be stored if they were computed.
        budget_s: most time a look-up takes, seconds.
        residual_tokens: at a prompt's end, which are not taken from a lossy codec.
        clock: monotonic, seconds.
    """

    def __init__(
        self,
        memory: HostMemory,
        context: ReadContext | None,
        readers: Executor,
        locks: ComputeLocks | None,
        doorkeeper: Doorkeeper,
        budget_s: float,
        residual_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._memory = memory
        self._context = context
        self._readers = readers
        self.locks = locks
        self._doorkeeper = doorkeeper
        self._budget = budget_s
        self._residual = residual_tokens
        self._clock = clock
        self.gate = LookupGate()
        self.reads = SingleFlight()

    async def look_up(self, wanted: Wanted, links: list[Link], chunk_tokens: int) -> Found:
        """Find the consecutive chunks at the start of `links`, which begin with that of the first token wanted.

        Never slower than the budget, however the store behaves, but where chunks keep coming from a process that is
        just computing them: then never longer than that without another one.
        """
        began = self._clock()
        up = _LookUp(wanted, links, began + self._budget, chunk_tokens)
        self._from_memory(up)
        if self._context is not None and up.hole < len(links) and self._context.store.health() != "off":
            held = up.hole
            if self._doorkeeper.knows(links[held]) or self.gate.pays(wanted.tenant, up.rest_s(held)):
                await self._from_redis(up)
                self.gate.looked(wanted.tenant, up.hole > held, self._clock() - began)
                await self._from_others(up, began)
        taken = up.usable(self._residual)
        return Found(
            start=links[0].index * chunk_tokens if links else wanted.held,
            chunks=[kv for kv, _, _ in taken],
            lossy=any(quality != EXACT for _, quality, _ in taken),
            tiers=tuple(tier for _, _, tier in taken),
        )

    def _from_memory(self, up: _LookUp) -> None:
        lossy = () if self._context is None or not up.wanted.lossy else self._context.encodings.readable(True)
        qualities = list(dict.fromkeys([EXACT, *(encoding.quality for encoding in lossy)]))
        held = self._memory.get(up.links, qualities)
        up.got = [None if each is None else (*each, "memory") for each in held]

    async def _from_redis(self, up: _LookUp) -> None:
        """Read what is missing; another request's reads are shared, and taken over where that request ends."""
        for _ in range(PASSES):
            if up.hole == len(up.got) or up.fault or not await self._pass(up):
                return

    async def _pass(self, up: _LookUp) -> bool:
        """Read once; True where a shared read was left by its owner, so that it may be tried again."""
        assert self._context is not None
        places = [place for place, each in enumerate(up.got) if each is None]
        lossy = up.wanted.lossy
        claims = dict(zip(places, self.reads.claim([up.links[p].digest for p in places], lossy), strict=True))
        own = [place for place in places if claims[place][1]]
        run: Run | None = None
        try:
            if own:
                run = self._start(up, own, [claims[place][0] for place in own])
            await self._settled(up, places, claims, run)
        finally:
            if run is not None:
                run.leave()
            for place in own:
                slot = claims[place][0]
                slot.settle("left")
                self.reads.land(up.links[place].digest, lossy, slot)
            self._collect(up, places, claims)
        if run is not None:
            up.fault |= run.fault
            up.decision = up.decision or run.decision
        hole = up.hole
        if hole == len(up.got):
            return False
        slot, mine = claims[hole]
        if mine:
            up.absent = run is not None and run.stored is not None and own.index(hole) >= run.stored
        else:  # the request of this process that looked for it did not find it
            up.absent = slot.state == "missing"
        return not mine and slot.state in ("left", "missing")

    def _start(self, up: _LookUp, own: list[int], slots: list[Slot]) -> Run:
        assert self._context is not None
        rest = [up.rest_s(place) for place in own]
        rest.append(up.rest_s(own[-1] + 1))
        links = [up.links[place] for place in own]
        run = Run(self._context, links, slots, up.wanted.lossy, rest, up.deadline, up.wake)
        with suppress(RuntimeError):  # the store is being closed: nothing will come
            self._readers.submit(run)
            return run
        run.leave()
        return run

    async def _settled(
        self, up: _LookUp, places: list[int], claims: dict[int, tuple[Slot, bool]], run: Run | None
    ) -> None:
        """Wait for the chunks in order, until all are there, one will not come, or it takes too long."""
        for place in places:
            claims[place][0].watch(up.wake)
        for place in places:
            slot, mine = claims[place]
            while slot.state == "pending":
                limit = run.limit if mine and run is not None else up.deadline
                left = limit - self._clock()
                if left <= 0:
                    if mine and run is not None:
                        run.leave(stalled=True)
                    return
                await up.wake.wait(left)
            if slot.state != "done":
                return

    def _collect(self, up: _LookUp, places: list[int], claims: dict[int, tuple[Slot, bool]]) -> None:
        """Take what came, and keep it in memory."""
        for place in places:
            slot, mine = claims[place]
            if slot.state == "done" and slot.kv is not None:
                up.got[place] = (slot.kv, slot.quality, "redis")
                if mine:
                    self._memory.put(up.links[place], slot.kv, slot.quality, up.links[:place])

    async def _from_others(self, up: _LookUp, began: float) -> None:
        """Say that this process computes what is missing, or wait a little for the process that already does."""
        waited = 0.0
        hole = up.hole
        if self._may_be_computed_elsewhere(up) and not await self._take_lock(up, hole):
            started = self._clock()
            await self._wait_for_chunks(up)
            waited = self._clock() - started
        assert self._context is not None
        if up.decision is not None:
            actual = self._clock() - began - waited + up.rest_s(up.hole)
            missed = regret(up.decision, actual)
            self._context.counts.outcome(missed, waited)
            log.debug(
                "prefix store: %d of %d chunks, %.4f s, waited %.4f s; expected %.4f, came to %.4f, regret %.4f s",
                up.hole, len(up.got), self._clock() - began, waited, up.decision.expected_s, actual, missed,
            )  # fmt: skip

    def _may_be_computed_elsewhere(self, up: _LookUp) -> bool:
        """Tell whether the first missing chunk is one that processes take turns to compute."""
        if not up.absent or up.fault or self.locks is None:
            return False
        link = up.links[up.hole]
        return self._doorkeeper.expects(link) and not self.locks.holds(link.digest)

    async def _take_lock(self, up: _LookUp, hole: int) -> bool:
        """Lock the chunk at `hole`; False: another process computes it."""
        assert self.locks is not None
        locks, digests = self.locks, [link.digest for link in up.links[hole:]]
        deadline = min(up.deadline, self._clock() + max(LOCK_WAIT_S, LOCK_WORTH * up.rest_s(hole)))

        def free(future: Future[bool]) -> None:
            if not future.cancelled() and future.exception() is None and future.result():
                with suppress(RuntimeError):  # the store is being closed; the lock expires
                    self._readers.submit(locks.ended, digests[0], self._clock() + LOCK_WAIT_S)

        try:
            future = self._readers.submit(locks.take, digests, 2.0 * up.rest_s(hole), deadline)
        except RuntimeError:
            return True
        waiting = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait({waiting}, timeout=max(0.0, deadline - self._clock()))
        except asyncio.CancelledError:
            waiting.cancel()
            future.add_done_callback(free)
            raise
        if not done:
            waiting.cancel()
            future.add_done_callback(free)
            return True
        try:
            return waiting.result()
        except StoreFault:
            return True

    async def _wait_for_chunks(self, up: _LookUp) -> None:
        """Take chunks as another process stores them, as long as the next one comes soon enough."""
        poll = LEAST_POLL_S
        until = self._clock() + self._patience(up)
        while (now := self._clock()) < min(until, up.deadline) and not up.fault:
            await asyncio.sleep(min(poll, until - now))
            hole = up.hole
            await self._pass(up)
            if up.hole == len(up.got):
                return
            if up.hole > hole:  # the other process is at it: the time of the look-up is that of each of its steps
                poll, until = LEAST_POLL_S, self._clock() + self._patience(up)
                up.deadline = self._clock() + self._budget
            else:
                poll = min(2 * poll, MOST_POLL_S)

    def _patience(self, up: _LookUp) -> float:
        assert self._context is not None
        controller, encodings = self._context.controller, self._context.encodings
        left = len(up.got) - up.hole
        transfer = left * encodings.raw_bytes / (controller.bandwidth or float("inf"))
        return controller.trip_s + transfer + max(PATIENCE * up.rest_s(up.hole), STEPS * up.step_s(up.hole))
