"""The Serve deployment that holds a pool of models. Its module is imported by replicas and pickled by nobody."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import TypeVar

from deployments.backend import Batch, Pool, merge
from deployments.coalesce import Pace, coalesce
from deployments.faults import guarded
from turnout.calls import (
    Event,
    Failure,
    GenerateCall,
    MethodDescription,
    ModelDescription,
    PoolStats,
    ScoreCall,
    ScoredTokens,
)
from turnout.config import TurnoutConfig
from turnout.errors import TurnoutError
from turnout.registry import all_methods

PoolLoader = Callable[[str, TurnoutConfig], Pool]
T = TypeVar("T")


def load_local_pool(name: str, config: TurnoutConfig) -> Pool:
    """The real engine; imported here so that only replicas pay for torch."""
    from engine.pool import LocalPool

    # Ray limits a replica's threads to its logical CPUs; the configuration's "all cores" means the machine's.
    threads = config.engine.threads or os.cpu_count()
    engine = config.engine.model_copy(update={"threads": threads})
    return LocalPool.load(name, config.model_copy(update={"engine": engine}))


class PoolReplica:
    """One copy of a pool. Refusals and failures leave as values: exceptions do not cross process borders."""

    def __init__(self, name: str, config: TurnoutConfig, load: PoolLoader) -> None:
        self._pool = load(name, config)
        self._pace = Pace()

    async def stream(self, call: GenerateCall) -> AsyncGenerator[Batch, None]:
        """Batches of events; the last event is Usage or Failure."""
        self._pace.streams += 1
        try:
            async with aclosing(coalesce(self._events(call), lambda: self._pace.gap_s)) as batches:
                async for batch in batches:
                    yield batch
        finally:
            self._pace.streams -= 1

    async def complete(self, call: GenerateCall) -> Batch | Failure:
        """The whole answer in one piece."""
        async with aclosing(self._events(call)) as events:
            collected = [event async for event in events]
        if collected and isinstance(collected[-1], Failure):
            return collected[-1]
        return merge(collected)

    async def score(self, call: ScoreCall) -> list[ScoredTokens] | Failure:
        """Log-likelihood of each completion."""
        try:
            with guarded(call.request_id):
                return await self._pool.score(call)
        except TurnoutError as error:
            return Failure(error)

    def models(self) -> list[ModelDescription]:
        """The pool first, then its members."""
        return self._pool.models()

    def methods(self) -> list[MethodDescription]:
        """Every registered decoding method."""
        return [
            MethodDescription(info.name, info.summary, info.seeds, info.lossless, info.params.model_json_schema())
            for info in all_methods()
        ]

    def stats(self) -> PoolStats:
        """What this replica holds right now."""
        return self._pool.stats()

    def tokens(self, prompt: str | tuple[int, ...]) -> tuple[tuple[int, ...], str] | Failure:
        """A prompt as token ids and as text."""
        try:
            with guarded("tokens"):
                if isinstance(prompt, str):
                    return tuple(self._pool.encode(prompt)), prompt
                return prompt, self._pool.decode(list(prompt))
        except TurnoutError as error:
            return Failure(error)

    async def _events(self, call: GenerateCall) -> AsyncGenerator[Event, None]:
        events = self._pool.generate(call)
        try:
            with guarded(call.request_id):
                async for event in events:
                    yield event
        except TurnoutError as error:
            yield Failure(error)
        finally:
            close = getattr(events, "aclose", None)
            if close is not None:
                await asyncio.shield(close())


class ServedPool(PoolReplica):
    """A replica as Serve runs it: stopping it closes the pool."""

    def __init__(self, name: str, config: TurnoutConfig, load: PoolLoader) -> None:
        self._closed = True  # until there is a pool
        super().__init__(name, config, load)
        self._closed = False

    def __del__(self) -> Coroutine[None, None, None] | None:
        """Serve calls this before it ends the process, and awaits what it returns."""
        if self._closed:
            return None
        self._closed = True
        return self._pool.close()
