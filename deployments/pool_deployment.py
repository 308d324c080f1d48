"""The Serve deployment that holds a pool of models. Its module is imported by replicas and never pickled."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray import serve

from decoding.parts import with_parts
from deployments.backend import Batch, Pool, merge
from deployments.coalesce import Coalescer, Pace
from deployments.faults import guarded
from deployments.migration import Handoff
from deployments.replica_load import ReplicaLoad
from deployments.version_check import Origin, agree
from turnout.calls import (
    Event,
    Failure,
    GenerateCall,
    MethodDescription,
    ModelDescription,
    PoolStats,
    ScoreCall,
    ScoredTokens,
    Usage,
)
from turnout.config import TurnoutConfig
from turnout.embed_calls import EmbedCall, Embeddings
from turnout.errors import Code, TurnoutError
from turnout.gc_freeze import freeze_loaded
from turnout.registry import all_methods
from turnout.tracing import flush, set_up

WHOLE_GAP_S = 0.5  # between parts of an answer that is read as a whole
PoolLoader = Callable[[str, TurnoutConfig], Pool]


def load_engine(name: str, config: TurnoutConfig) -> Pool:
    """The real engine, its models here, in actors or elsewhere; imported here so that only replicas pay for torch."""
    if config.endpoint_roles(config.pools[name]):
        from pool.endpoints.text_pool import load_text_pool
        from pool.local_pool import LocalPool

        return load_text_pool(name, config, lambda pool, alone: LocalPool.load(pool, alone, os.cpu_count()))
    if config.pools[name].placement.models == "actors":
        from actors.pool import ActorPool

        return ActorPool.load(name, config)
    from pool.local_pool import LocalPool

    # Ray limits a replica's threads to its logical CPUs; the configuration's "all cores" means the machine's.
    return LocalPool.load(name, config, os.cpu_count())


class PoolReplica:
    """One copy of a pool. Refusals and failures leave as values: exceptions do not cross process borders."""

    def __init__(self, name: str, config: TurnoutConfig, load: PoolLoader) -> None:
        self._pool = load(name, config)
        self._pace = Pace()
        self._load = ReplicaLoad(self._pool.stats, config.engine.block_size)
        self._handoff = Handoff(self._pool)

    async def stream(self, call: GenerateCall) -> AsyncGenerator[Batch, None]:
        """Batches of events; the last event is Usage or Failure."""
        read = not call.whole
        self._pace.streams += read
        try:
            gap_s = (lambda: self._pace.gap_s) if read else (lambda: WHOLE_GAP_S)
            async with aclosing(Coalescer(partial(self._answer, call), gap_s)) as batches:
                async for batch in batches:
                    yield batch
        finally:
            self._pace.streams -= read

    async def complete(self, call: GenerateCall) -> Batch:
        """The whole answer in one piece; where it failed, what there is of it, and the Failure."""
        collected: list[Event] = []
        await self._answer(call, collected.append)
        return merge(collected)

    async def score(self, call: ScoreCall) -> list[ScoredTokens] | Failure:
        """Log-likelihood of each completion."""
        try:
            with guarded(call.request_id):
                return await self._pool.score(call)
        except TurnoutError as error:
            return Failure(error)

    async def embed(self, call: EmbedCall) -> Embeddings | Failure:
        """Embeddings of texts."""
        try:
            with guarded(call.request_id):
                return await self._pool.embed(call)
        except TurnoutError as error:
            return Failure(error)

    def models(self) -> list[ModelDescription]:
        """The pool first, then its members."""
        return self._pool.models()

    def methods(self) -> list[MethodDescription]:
        """Every registered decoding method."""
        return [
            MethodDescription(
                info.name, info.summary, info.papers, info.lossless, with_parts(info.params.model_json_schema())
            )
            for info in all_methods()
        ]

    def stats(self) -> PoolStats:
        """What this replica holds right now."""
        return self._pool.stats()

    async def tokens(self, call: GenerateCall) -> tuple[tuple[int, ...], str] | Failure:
        """What a call gives its models to read, as token ids and as text."""
        try:
            with guarded("tokens"):
                ids = await self._pool.tokens(call)
                return tuple(ids), self._pool.decode(ids)
        except TurnoutError as error:
            return Failure(error)

    async def hand_over(self, request_id: str | None = None, again: bool = False) -> int:
        """Let calls stop here and go on in another replica; how many do. See `deployments.migration.Handoff`."""
        return await self._handoff.hand_over(request_id, again)

    def send_away(self, count: int) -> int:
        """Let calls that wait for a place go on in another replica; return how many do."""
        return self._pool.send_away(count)

    async def forget(self, tenant: str) -> None:
        """Drop what was learned of a tenant's texts."""
        self._pool.forget(tenant)

    async def _answer(self, call: GenerateCall, put: Callable[[Event], None]) -> None:
        """Give all events of an answer to `put`; the last one is Usage or Failure."""
        self._load.begun()
        answered = False
        try:
            events = self._pool.generate(await self._handoff.incoming(call))
            try:
                with guarded(call.request_id):
                    async for event in events:
                        answered = answered or isinstance(event, Usage)
                        put(event)
            except TurnoutError as error:
                put(Failure(await self._handoff.outgoing(error)))
            finally:
                close = getattr(events, "aclose", None)
                if close is not None:
                    await asyncio.shield(close())
        finally:
            self._load.ended(call, answered)


class ServedPool(PoolReplica):
    """A replica as Serve runs it: it is asked how it is and what it has to do, and stopping it closes the pool."""

    def __init__(self, name: str, config: TurnoutConfig, load: PoolLoader, origin: Origin) -> None:
        self._closed = True  # until there is a pool
        address = ray.util.get_node_ip_address()
        origin.check_program(address)
        set_up(config.telemetry.traces, f"pool-{name}")
        super().__init__(name, config, load)
        self._placement = config.pools[name].placement
        self._place = f"{address} pid {os.getpid()}"
        digests = {each: model.digest for each, model in self._pool.members.items()}
        if digests:  # other pools than an engine's need not have models
            application = serve.get_replica_context().app_name
            agree(application, name, origin.version, digests, self._place, config)
        freeze_loaded()
        self._closed = False

    def stats(self) -> PoolStats:
        """What this replica holds right now, where it runs, what its clock says, and what it found while loading."""
        notes = tuple(self._pool.notes)
        return replace(super().stats(), place=self._place, now=time.time(), notes=notes)

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
