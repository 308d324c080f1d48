"""Running calls from one replica to another: what a replica packs lies in a depot until the next one fetches it.

The depot is an actor of its own, beside no replica: it outlives the one that ends, keeps what it holds for a short
time and up to a number of bytes, and ends by itself. A cache that does not arrive is computed again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from turnout.calls import GenerateCall, MovedCache
from turnout.errors import Interrupted, TurnoutError

log = logging.getLogger("ray.serve")

NAMESPACE = "turnout-moving"
MOST_BYTES = 1 << 30  # in one depot
KEPT_S = 30.0  # how long a cache waits to be fetched, and a depot for another one
START_S = 5.0  # for a depot to answer; calls do not wait meanwhile, but who ends a replica does
FETCH_S = 5.0  # to leave or to fetch a cache: longer than most take to compute, and the client waits


@runtime_checkable
class HandsOver(Protocol):
    """A pool whose calls can go on elsewhere."""

    def hand_over(self, request_id: str | None = None, again: bool = False) -> int:
        """See `pool.pool.Pool.hand_over`."""
        ...


@dataclass(frozen=True, slots=True)
class Ticket:
    """Where a cache is to be fetched: a depot's name, a key there, and what the bytes mean."""

    depot: str
    key: str
    shape: tuple[int, ...]
    dtype: str


class Shelf:
    """What lies in a depot: values of known size, each for so long.

    Args:
        most_bytes: of all values together; what does not fit is refused.
        kept_s: seconds a value is kept.
    """

    def __init__(self, most_bytes: int = MOST_BYTES, kept_s: float = KEPT_S) -> None:
        self._most_bytes = most_bytes
        self._kept_s = kept_s
        self._values: dict[str, tuple[float, int, Any]] = {}

    @property
    def nbytes(self) -> int:
        """Held now."""
        return sum(size for _, size, _ in self._values.values())

    def put(self, key: str, value: Any, nbytes: int, now: float) -> bool:
        """Keep a value, if there is room."""
        self.sweep(now)
        if self.nbytes + nbytes > self._most_bytes:
            return False
        self._values[key] = (now + self._kept_s, nbytes, value)
        return True

    def take(self, key: str, now: float) -> Any | None:
        """A value, once; None: it is not there any more."""
        self.sweep(now)
        return self._values.pop(key, (0.0, 0, None))[2]

    def sweep(self, now: float) -> None:
        """Forget what nobody fetched in time."""
        for key in [key for key, (until, _, _) in self._values.items() if until < now]:
            del self._values[key]


class Depot:
    """An actor with a shelf. Ends when nothing was put for a while."""

    def __init__(self, most_bytes: int = MOST_BYTES, kept_s: float = KEPT_S) -> None:
        self._shelf = Shelf(most_bytes, kept_s)
        self._kept_s = kept_s
        self._last = time.monotonic()
        self._waiting = asyncio.get_running_loop().create_task(self._wait())

    async def ready(self) -> None:
        """Answers when it runs; from now on it stays a while."""
        self._last = time.monotonic()

    async def put(self, key: str, value: Any, nbytes: int) -> bool:
        """Keep bytes, as a copy: what came lies in memory of its sender."""
        self._last = time.monotonic()
        return self._shelf.put(key, value.copy(), nbytes, self._last)

    async def take(self, key: str) -> Any | None:
        """What was put under a key, once."""
        return self._shelf.take(key, time.monotonic())

    async def _wait(self) -> None:
        while time.monotonic() < self._last + 2 * self._kept_s:
            await asyncio.sleep(self._kept_s / 4)
            self._shelf.sweep(time.monotonic())
        ray.kill(ray.get_runtime_context().current_actor)


class Mover:
    """What a replica does for calls that leave it, and for those that come.

    Args:
        pool: the replica's.
        start_s: how long a depot may take to start; after that, calls leave without their caches.
    """

    def __init__(self, pool: Any, start_s: float = START_S) -> None:
        self._pool = pool
        self._start_s = start_s
        self._depot: Any = None
        self._name = ""
        self._starting = asyncio.Lock()

    async def hand_over(self, request_id: str | None = None, again: bool = False) -> int:
        """Let calls stop here and go on in another replica; see `pool.pool.Pool.hand_over`.

        They run on until there is a place to leave their caches in.

        Returns:
            How many calls stop; 0 also where this pool cannot hand over.
        """
        if not isinstance(self._pool, HandsOver):
            return 0
        if ray.is_initialized():
            await self._ready()
        return self._pool.hand_over(request_id, again)

    async def outgoing(self, error: TurnoutError) -> TurnoutError:
        """The failure a call ends with, as it crosses to another process: caches stay in the depot."""
        if not isinstance(error, Interrupted) or error.moved is None or not ray.is_initialized():
            return error
        left = await asyncio.gather(*(self._leave(cache) for cache in error.moved.caches))
        caches = tuple(cache for cache in left if cache is not None)
        return Interrupted(error.message, replace(error.moved, caches=caches))

    async def incoming(self, call: GenerateCall) -> GenerateCall:
        """A call with the caches that another replica left for it."""
        if call.moved is None or not any(isinstance(cache.kv, Ticket) for cache in call.moved.caches):
            return call
        most_s = FETCH_S if call.deadline_s is None else min(FETCH_S, call.deadline_s / 4)
        found = await asyncio.gather(*(_fetch(cache, most_s) for cache in call.moved.caches))
        return replace(call, moved=replace(call.moved, caches=tuple(cache for cache in found if cache is not None)))

    async def _ready(self) -> None:
        """Have a depot that runs; without one, calls leave without their caches."""
        async with self._starting:
            for _ in range(2):  # one that has ended is replaced
                try:
                    if self._depot is None:
                        self._depot, self._name = await asyncio.to_thread(_start_depot)
                    await asyncio.wait_for(self._depot.ready.remote(), self._start_s)
                    return
                except TimeoutError:
                    log.warning("a depot for moved caches did not answer in %g s", self._start_s)
                    self._depot = None
                    return
                except Exception:
                    log.warning("a depot for moved caches has ended, or could not be started", exc_info=True)
                    self._depot = None

    async def _leave(self, cache: MovedCache) -> MovedCache | None:
        if self._depot is None:
            return None
        key, depot = secrets.token_hex(16), self._depot
        try:
            from engine.kv_transfer import as_bytes  # here: who only passes calls on needs no torch

            # As bytes: the depot needs no torch, and numpy knows no bfloat16.
            flat, shape, dtype = as_bytes(cache.kv)
            kept = await asyncio.wait_for(depot.put.remote(key, flat, cache.nbytes), FETCH_S)
        except Exception:
            log.warning("a cache could not be left in the depot", exc_info=True)
            return None
        return replace(cache, kv=Ticket(self._name, key, shape, dtype)) if kept else None


def _start_depot() -> tuple[Any, str]:
    """A new depot, outside the replica's placement group, which ends with the replica."""
    name = f"depot-{secrets.token_hex(8)}"
    options: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "num_cpus": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(placement_group=None),
    }
    return ray.remote(Depot).options(**options).remote(), name


async def _fetch(cache: MovedCache, most_s: float) -> MovedCache | None:
    ticket = cache.kv
    if not isinstance(ticket, Ticket):
        return cache
    try:
        async with asyncio.timeout(most_s):
            depot = await asyncio.to_thread(ray.get_actor, ticket.depot, NAMESPACE)
            flat = await depot.take.remote(ticket.key)
        if flat is None:
            return None
        from engine.kv_transfer import as_tensor

        return replace(cache, kv=as_tensor(flat, ticket.shape, ticket.dtype))
    except Exception:
        log.warning("a moved cache could not be fetched; it is computed", exc_info=True)
        return None
