"""Health of the whole server, from what the replicas of its pools say."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Generic, Literal, TypeVar

from turnout.calls import CacheStats, EndpointStats, PoolStats
from turnout.errors import TurnoutError

Health = Literal["ok", "degraded", "unavailable"]


@dataclass(frozen=True, slots=True)
class HealthReport:
    """Answer to a health check.

    Attributes:
        status: ok; degraded: every pool answers, but some replica cannot reach all of its prefix store, or an endpoint
            of its pool; unavailable: some pool does not answer.
        store: "degraded: <reason>" where some replica cannot reach all of its prefix store; "" otherwise. It names no
            pool and no address: the check needs no key.
        endpoints: "degraded: <reason>" where some model that is a server elsewhere is left alone; "" otherwise.
    """

    status: Health
    store: str = ""
    endpoints: str = ""


def health_of(pools: Mapping[str, list[PoolStats] | TurnoutError]) -> HealthReport:
    """Judge what the replicas of each pool hold, or why a pool does not answer."""
    answered = [stats for stats in pools.values() if not isinstance(stats, TurnoutError)]
    store = _store([each.cache for stats in answered for each in stats if each.cache is not None])
    endpoints = _endpoints([each for stats in answered for replica in stats for each in replica.endpoints])
    if len(answered) < len(pools):
        return HealthReport("unavailable", store, endpoints)
    return HealthReport("degraded" if store or endpoints else "ok", store, endpoints)


def _endpoints(endpoints: list[EndpointStats]) -> str:
    """Describe endpoints that are left alone: a breaker is open, or a request tries whether it can be closed."""
    down = {each.model for each in endpoints if each.breaker != "closed"}
    if not down:
        return ""
    what = "1 endpoint does" if len(down) == 1 else f"{len(down)} endpoints do"
    return f"degraded: {what} not answer; their breakers are open"


def _store(caches: list[CacheStats]) -> str:
    """Describe prefix stores of which some node is avoided: its breaker is open, or it lost its part of the keys."""
    counts = {state: sum(cache.health == state for cache in caches) for state in ("off", "degraded")}
    what = {"off": "the prefix store", "degraded": "all of the prefix store"}
    reasons = [f"{n} of {len(caches)} replicas cannot reach {what[state]}" for state, n in counts.items() if n]
    return f"degraded: {', '.join(reasons)}; what it holds is computed" if reasons else ""


T = TypeVar("T")


class SharedAnswer(Generic[T]):
    """Asks no more often than once in a while, however many want to know. One event loop.

    Args:
        ask: gives the answer; an error of it is shared too.
        kept_s: age up to which an answer is reused, in seconds.
        clock: seconds.
    """

    def __init__(
        self, ask: Callable[[], Coroutine[Any, Any, T]], kept_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask = ask
        self._kept_s = kept_s
        self._clock = clock
        self._asked = -inf
        self._answer: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """The answer: of now, or of just before."""
        now = self._clock()
        if self._answer is None or (self._answer.done() and now - self._asked >= self._kept_s):
            self._asked, self._answer = now, asyncio.create_task(self._ask())
        # A caller that is cancelled does not cancel it for the others.
        return await asyncio.shield(self._answer)
