"""Call migration between replicas: caches lie in a handoff store until the next replica fetches them.

The store is an actor outside every replica's placement group: it outlives the replica that ends, holds a limited number
of bytes for a short time, and ends by itself. A cache that does not arrive is computed again.
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

from turnout.calls import GenerateCall
from turnout.errors import Interrupted, TurnoutError
from turnout.moved_calls import MovedCache

log = logging.getLogger("ray.serve")

NAMESPACE = "turnout-moving"
MOST_BYTES = 1 << 30  # in one store
KEPT_S = 30.0  # how long a cache waits to be fetched, and a store for another one
START_S = 5.0  # for a store to answer; calls do not wait meanwhile, but who ends a replica does
FETCH_S = 5.0  # to leave or to fetch a cache: longer than most take to compute, and the client waits


@runtime_checkable
class HandsOver(Protocol):
    """A pool whose calls can go on elsewhere."""

    def hand_over(self, request_id: str | None = None, again: bool = False) -> int:
        """See `pool.pool.Pool.hand_over`."""
        ...


@dataclass(frozen=True, slots=True)
class HandoffHandle:
    """Handle of a cache in a handoff store: the store's name, the key, shape and dtype of the bytes."""

    store: str
    key: str
    shape: tuple[int, ...]
    dtype: str


class BoundedStore:
    """Store of values of known size, each for a limited time.

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
        """Forget what was not fetched in time."""
        for key in [key for key, (until, _, _) in self._values.items() if until < now]:
            del self._values[key]


class HandoffStore:
    """Actor with a bounded store; it ends when nothing was put for a while."""

    def __init__(self, most_bytes: int = MOST_BYTES, kept_s: float = KEPT_S) -> None:
        self._values = BoundedStore(most_bytes, kept_s)
        self._kept_s = kept_s
        self._last = time.monotonic()
        self._waiting = asyncio.get_running_loop().create_task(self._wait())

    async def ready(self) -> None:
        """Answers when it runs; from now on it stays a while."""
        self._last = time.monotonic()

    async def put(self, key: str, value: Any, nbytes: int) -> bool:
        """Keep bytes, as a copy: what came lies in memory of its sender."""
        self._last = time.monotonic()
        return self._values.put(key, value.copy(), nbytes, self._last)

    async def take(self, key: str) -> Any | None:
        """What was put under a key, once."""
        return self._values.take(key, time.monotonic())

    async def _wait(self) -> None:
        while time.monotonic() < self._last + 2 * self._kept_s:
            await asyncio.sleep(self._kept_s / 4)
            self._values.sweep(time.monotonic())
        ray.kill(ray.get_runtime_context().current_actor)


class Handoff:
    """Handoff of calls that leave a replica, and of those that arrive.

    Args:
        pool: the replica's.
        start_s: how long a store may take to start; after that, calls leave without their caches.
    """

    def __init__(self, pool: Any, start_s: float = START_S) -> None:
        self._pool = pool
        self._start_s = start_s
        self._store: Any = None
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
        """The failure a call ends with, as it crosses to another process: caches stay in the store."""
        if not isinstance(error, Interrupted) or error.moved is None or not ray.is_initialized():
            return error
        left = await asyncio.gather(*(self._leave(cache) for cache in error.moved.caches))
        caches = tuple(cache for cache in left if cache is not None)
        return Interrupted(error.message, replace(error.moved, caches=caches))

    async def incoming(self, call: GenerateCall) -> GenerateCall:
        """A call with the caches that another replica left for it."""
        if call.moved is None or not any(isinstance(cache.kv, HandoffHandle) for cache in call.moved.caches):
            return call
        most_s = FETCH_S if call.deadline_s is None else min(FETCH_S, call.deadline_s / 4)
        found = await asyncio.gather(*(_fetch(cache, most_s) for cache in call.moved.caches))
        return replace(call, moved=replace(call.moved, caches=tuple(cache for cache in found if cache is not None)))

    async def _ready(self) -> None:
        """Have a store that runs; without one, calls leave without their caches."""
        async with self._starting:
            for _ in range(2):  # one that has ended is replaced
                try:
                    if self._store is None:
                        self._store, self._name = await asyncio.to_thread(_start_store)
                    await asyncio.wait_for(self._store.ready.remote(), self._start_s)
                    return
                except TimeoutError:
                    log.warning("a store for moved caches did not answer in %g s", self._start_s)
                    self._store = None
                    return
                except Exception:
                    log.warning("a store for moved caches has ended, or could not be started", exc_info=True)
                    self._store = None

    async def _leave(self, cache: MovedCache) -> MovedCache | None:
        if self._store is None:
            return None
        key, store = secrets.token_hex(16), self._store
        try:
            from engine.kv_transfer import as_bytes  # here: who only passes calls on needs no torch

            # As bytes: the store needs no torch, and numpy knows no bfloat16.
            flat, shape, dtype = as_bytes(cache.kv)
            kept = await asyncio.wait_for(store.put.remote(key, flat, cache.nbytes), FETCH_S)
        except Exception:
            log.warning("a cache could not be left in the store", exc_info=True)
            return None
        return replace(cache, kv=HandoffHandle(self._name, key, shape, dtype)) if kept else None


def _start_store() -> tuple[Any, str]:
    """A new store, outside the replica's placement group, which ends with the replica."""
    name = f"store-{secrets.token_hex(8)}"
    options: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "num_cpus": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(placement_group=None),
    }
    return ray.remote(HandoffStore).options(**options).remote(), name


async def _fetch(cache: MovedCache, most_s: float) -> MovedCache | None:
    handle = cache.kv
    if not isinstance(handle, HandoffHandle):
        return cache
    try:
        async with asyncio.timeout(most_s):
            store = await asyncio.to_thread(ray.get_actor, handle.store, NAMESPACE)
            flat = await store.take.remote(handle.key)
        if flat is None:
            return None
        from engine.kv_transfer import as_tensor

        return replace(cache, kv=as_tensor(flat, handle.shape, handle.dtype))
    except Exception:
        log.warning("a moved cache could not be fetched; it is computed", exc_info=True)
        return None
