"""The Serve deployment that holds a pool of models. Its module is imported by replicas and never pickled."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from deployments.backend import Pool
from deployments.coalesce import Pace
from deployments.migration import Handoff
from deployments.pool_answers import PoolAnswers
from deployments.replica_load import ReplicaLoad
from deployments.version_check import Origin, agree
from turnout.calls import Event, Failure, GenerateCall, Usage
from turnout.config import TurnoutConfig
from turnout.errors import Code, TurnoutError
from turnout.gc_freeze import freeze_loaded
from turnout.tracing import flush, set_up

if TYPE_CHECKING:
    from pool.local_pool import LocalPool

PoolLoader = Callable[[str, TurnoutConfig], Pool]


def load_engine(name: str, config: TurnoutConfig) -> Pool:
    """The real engine, its models here, in actors or elsewhere; imported here so that only who loads pays for torch."""
    if config.endpoint_roles(config.pools[name]):
        from pool.endpoints.text_pool import load_text_pool

        return load_text_pool(name, config, _load_here)
    if config.pools[name].placement.models == "actors":
        from actors.pool import ActorPool

        return ActorPool.load(name, config)
    return _load_here(name, config)


def _load_here(name: str, config: TurnoutConfig) -> LocalPool:
    from pool.local_pool import LocalPool

    # Ray limits a replica's threads to its logical CPUs; the configuration's "all cores" means the machine's.
    return LocalPool.load(name, config, os.cpu_count())


class PoolReplica(PoolAnswers):
    """One copy of a pool, for callers in other processes: its calls may leave for another copy."""

    def __init__(self, name: str, config: TurnoutConfig, load: PoolLoader, place: str = "") -> None:
        super().__init__(load(name, config), Pace(), place)
        self._load = ReplicaLoad(self._pool.stats, config.engine.block_size)
        self._handoff = Handoff(self._pool)

    async def hand_over(self, request_id: str | None = None, again: bool = False) -> int:
        """Let calls stop here and go on in another replica; how many do. See `deployments.migration.Handoff`."""
        return await self._handoff.hand_over(request_id, again)

    def send_away(self, count: int) -> int:
        """Let calls that wait for a place go on in another replica; return how many do."""
        return self._pool.send_away(count)

    async def _answer(self, call: GenerateCall, put: Callable[[Event], None]) -> None:
        """See `PoolAnswers`; a call that comes from another replica finds its caches."""
        self._load.begun()
        answered = False

        def seen(event: Event) -> None:
            nonlocal answered
            answered = answered or isinstance(event, Usage)
            put(event)

        try:
            await super()._answer(await self._handoff.incoming(call), seen)
        finally:
            self._load.ended(call, answered)

    async def _failure(self, error: TurnoutError) -> Failure:
        """See `PoolAnswers`; what a call that leaves takes along is left where another replica finds it."""
        return Failure(await self._handoff.outgoing(error))


class ServedPool(PoolReplica):
    """A replica as Serve runs it: it is asked how it is and what it has to do, and stopping it closes the pool."""

    def __init__(self, name: str, config: TurnoutConfig, load: PoolLoader, origin: Origin) -> None:
        self._closed = True  # until there is a pool
        address = ray.util.get_node_ip_address()
        origin.check_program(address)
        set_up(config.telemetry.traces, f"pool-{name}")
        super().__init__(name, config, load, f"{address} pid {os.getpid()}")
        self._placement = config.pools[name].placement
        digests = {each: model.digest for each, model in self._pool.members.items()}
        if digests:  # other pools than an engine's need not have models
            application = serve.get_replica_context().app_name
            agree(application, name, origin.version, digests, self._place, config)
        freeze_loaded()
        self._closed = False

    async def check_health(self) -> None:
        """Serve replaces this replica when this raises three times in a row.

        Raises:
            TurnoutError: the pool cannot go on.
        """
        self._pool.check()
        if self._placement.models == "colocated":  # who supervises actors looks at theirs
            for member in self._pool.stats().members:
                if member.working_s > self._placement.forward_timeout_s:
                    what = f"a forward of {member.model} has been running for {member.working_s:.1f} s"
                    raise TurnoutError(Code.INTERNAL, f"{what} (placement.forward_timeout_s)")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve asks again and again, where the number of replicas follows the load."""
        return self._load.autoscaling()

    def record_routing_stats(self) -> dict[str, Any]:
        """Serve asks again and again, and tells everybody who calls this pool."""
        return {**self._load.routing(), "place": self._place}

    def __del__(self) -> Coroutine[None, None, None] | None:
        """Serve calls this before it ends the process, and awaits what it returns."""
        if self._closed:
            return None
        self._closed = True
        return self._stop()

    async def _stop(self) -> None:
        await self._pool.close()
        flush()
