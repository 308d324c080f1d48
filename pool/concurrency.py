"""The places of a pool: how many calls it works on at once, and whose call is next when one becomes free."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from turnout.errors import Code, Interrupted, TurnoutError, busy
from turnout.moved_calls import Moved


class ConcurrencyLimiter:
    """Hands out a pool's places fairly between tenants.

    A place that becomes free goes to the tenant that holds fewest, then to the one served least recently; within a
    tenant, the lowest rank first, and of these, first come, first served. A tenant with less than its equal share of
    the places need not wait for others to finish: it gets one at once, so that all places taken by one tenant are no
    wall for the next. Calls can exceed the limit in this way up to twofold; as others finish, their places are not
    given out again.

    Args:
        name: the pool's, for messages.
        limit: calls worked on at once.
        max_waiting: calls waiting before new ones are refused, shared equally between tenants in the same way.
        strict: whether the limit is never exceeded: a tenant without a place waits until one is free.
        kind: of what has the places, for messages.
    """

    def __init__(self, name: str, limit: int, max_waiting: int, strict: bool = False, kind: str = "pool") -> None:
        self._name = f"{kind} {name!r}"
        self._most = limit if strict else 2 * limit
        self._strict, self._kind, self._given = strict, kind, name
        self._limit = limit
        self._max_waiting = max_waiting
        self._held: dict[str, int] = {}
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._staying: set[asyncio.Future[None]] = set()
        self._ranks: dict[asyncio.Future[None], int] = {}
        self._turns: dict[str, int] = {}  # when each tenant was last given a place
        self._turn = 0

    def copy(self) -> ConcurrencyLimiter:
        """Return a limiter with the same limits and places of its own."""
        return ConcurrencyLimiter(self._given, self._limit, self._max_waiting, self._strict, self._kind)

    @property
    def num_held(self) -> int:
        """Calls worked on."""
        return sum(self._held.values())

    @property
    def num_waiting(self) -> int:
        """Calls that wait for a place."""
        return sum(len(queue) for queue in self._waiting.values())

    @property
    def full(self) -> bool:
        """Whether calls already take every place."""
        return self.num_held >= self._limit

    @asynccontextmanager
    async def hold(
        self, tenant: str, deadline_s: float | None = None, stays: bool = False, rank: int = 0
    ) -> AsyncIterator[None]:
        """A place, for as long as the context lasts.

        Args:
            tenant: whose call it is.
            deadline_s: seconds it may wait for the place; None is any time.
            stays: it is not sent away while it waits.
            rank: of the tenant's calls, the lowest is served first.

        Raises:
            TurnoutError: RESOURCE_EXHAUSTED when too many calls wait already, DEADLINE_EXCEEDED.
            Interrupted: it is to wait elsewhere.
        """
        await self._take(tenant, deadline_s, stays, rank)
        try:
            yield
        finally:
            self._release(tenant)

    def send_away(self, count: int) -> int:
        """End the waiting of calls, for those to go on elsewhere: the last one of the longest queue first.

        Returns:
            How many calls leave.
        """
        for left in range(count, 0, -1):
            leaving = {
                tenant: place
                for tenant, queue in self._waiting.items()
                if (place := next((each for each in reversed(queue) if each not in self._staying), None)) is not None
            }
            if not leaving:
                return count - left
            tenant = max(leaving, key=lambda each: len(self._waiting[each]))
            self._forget(tenant, leaving[tenant])
            leaving[tenant].set_exception(Interrupted(f"{self._name} has free places elsewhere", Moved()))
        return count

    async def _take(self, tenant: str, deadline_s: float | None, stays: bool, rank: int) -> None:
        if self._is_free_for(tenant) and tenant not in self._waiting:
            self._give(tenant)
            return
        mine = len(self._waiting.get(tenant, ()))
        if self.num_waiting >= self._max_waiting and mine >= self._share(self._max_waiting, tenant):
            raise busy(f"{self._name} has no room for another request")
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._enqueue(tenant, place, rank)
        if stays:
            self._staying.add(place)
        try:
            async with asyncio.timeout(deadline_s):
                await self._granted(tenant, place)
        except TimeoutError:
            message = f"deadline_s: {deadline_s:g} s have passed"
            raise TurnoutError(Code.DEADLINE_EXCEEDED, message, "deadline_s") from None
        finally:
            self._staying.discard(place)
            del self._ranks[place]

    def _enqueue(self, tenant: str, place: asyncio.Future[None], rank: int) -> None:
        self._ranks[place] = rank
        queue = self._waiting.setdefault(tenant, deque())
        before = len(queue)
        while before and self._ranks[queue[before - 1]] > rank:
            before -= 1
        queue.insert(before, place)

    async def _granted(self, tenant: str, place: asyncio.Future[None]) -> None:
        """Wait for the place; a caller that gives up leaves the queue, or passes the place on."""
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled() and place.exception() is None:
                self._release(tenant)  # it was given in the same moment
            elif place in self._waiting.get(tenant, ()):
                self._forget(tenant, place)
            raise

    def _forget(self, tenant: str, place: asyncio.Future[None]) -> None:
        queue = self._waiting[tenant]
        queue.remove(place)
        if not queue:
            del self._waiting[tenant]

    def _share(self, total: int, tenant: str) -> int:
        """An equal part of `total` for each tenant that holds a place or waits, at least 1."""
        return max(total // len(self._held.keys() | self._waiting.keys() | {tenant}), 1)

    def _is_free_for(self, tenant: str) -> bool:
        held = self.num_held
        if held < self._limit:
            return True
        return held < self._most and self._held.get(tenant, 0) < self._share(self._limit, tenant)

    def _give(self, tenant: str) -> None:
        self._turn += 1
        self._turns[tenant] = self._turn
        self._held[tenant] = self._held.get(tenant, 0) + 1

    def _release(self, tenant: str) -> None:
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self._hand_out()

    def _hand_out(self) -> None:
        """Give places to those who wait, as far as there are any."""
        while self._waiting:
            tenant = min(self._waiting, key=lambda t: (self._held.get(t, 0), self._turns.get(t, 0)))
            if not self._is_free_for(tenant):
                break
            queue = self._waiting[tenant]
            place = queue.popleft()
            if not queue:
                del self._waiting[tenant]
            if not place.cancelled():
                self._give(tenant)
                place.set_result(None)
        known = self._held.keys() | self._waiting.keys()
        self._turns = {tenant: turn for tenant, turn in self._turns.items() if tenant in known}
