"""Places of shadows at an endpoint: those that requests leave free, and only as long as they leave them free."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from pool.concurrency import ConcurrencyLimiter
from turnout.errors import Code, TurnoutError


class ShadowPlaces:
    """Places that shadows hold at one endpoint.

    A shadow never waits: it begins where a place is free, or not at all. A request that would find every place taken
    ends the newest shadow, so that the endpoint has no more than its limit, and no request waits for a shadow.

    Args:
        name: the endpoint's, for messages.
        places: of requests.
        limit: requests and shadows that may be there at once.
    """

    def __init__(self, name: str, places: ConcurrencyLimiter, limit: int) -> None:
        self._name = name
        self._places = places
        self._limit = limit
        self._running: list[asyncio.Task[object]] = []

    @property
    def _full(self) -> bool:
        return self._places.num_held + len(self._running) >= self._limit

    @contextmanager
    def hold(self) -> Iterator[None]:
        """A place for the shadow that the current task runs; the task is cancelled where a request needs it.

        Raises:
            TurnoutError: CANCELLED: no place is free.
        """
        task = asyncio.current_task()
        if self._full or task is None:
            raise TurnoutError(Code.CANCELLED, f"endpoint {self._name!r} has no free place for a shadow")
        self._running.append(task)
        try:
            yield
        finally:
            if task in self._running:
                self._running.remove(task)

    def make_room(self) -> None:
        """End the newest shadow where requests and shadows take all places: a request is about to take one."""
        if self._running and self._full:
            self._running.pop().cancel()
