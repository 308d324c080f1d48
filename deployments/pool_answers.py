"""Answers of a pool in this process: events in batches. Refusals and failures are values, the last of their answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from decoding.parts import part_schemas, with_parts
from deployments.backend import Batch, Pool, merge
from deployments.coalesce import Coalescer, Pace
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
from turnout.embed_calls import EmbedCall, Embeddings, TaskAnswer, TaskCall
from turnout.errors import TurnoutError
from turnout.registry import all_methods

WHOLE_GAP_S = 0.5  # between parts of an answer that is read as a whole


class PoolAnswers:
    """What a pool says, for readers in this process or in another one.

    Args:
        pool: answers.
        pace: of the batches of streams; None: what has come leaves at once, for readers in this process.
        place: node and process, for `stats`; "": as the pool says.
    """

    def __init__(self, pool: Pool, pace: Pace | None = None, place: str = "") -> None:
        self._pool = pool
        self._pace = pace
        self._place = place

    async def stream(self, call: GenerateCall) -> AsyncGenerator[Batch, None]:
        """Batches of events; the last event is Usage or Failure."""
        pace = None if call.whole else self._pace
        if pace is not None:
            pace.streams += 1
        try:
            async with aclosing(Coalescer(partial(self._answer, call), partial(self._gap_s, call.whole))) as batches:
                async for batch in batches:
                    yield batch
        finally:
            if pace is not None:
                pace.streams -= 1

    def _gap_s(self, whole: bool) -> float:
        """Seconds between two batches of one answer."""
        if whole:
            return WHOLE_GAP_S
        return self._pace.gap_s if self._pace is not None else 0.0

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

    async def task(self, call: TaskCall) -> TaskAnswer | Failure:
        """Carry out a task."""
        try:
            with guarded(call.request_id):
                return await self._pool.task(call)
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

    def parts(self, slots: frozenset[str]) -> dict[str, dict[str, Any]]:
        """JSON schemas of parts: by slot, then by name."""
        return part_schemas(slots)

    def stats(self) -> PoolStats:
        """What the pool holds right now, where it runs, what its clock says, and what it found while loading."""
        stats = self._pool.stats()
        if not self._place:
            return stats
        return replace(stats, place=self._place, now=time.time(), notes=tuple(self._pool.notes))

    async def tokens(self, call: GenerateCall) -> tuple[tuple[int, ...], str] | Failure:
        """What a call gives its models to read, as token ids and as text."""
        try:
            with guarded("tokens"):
                ids = await self._pool.tokens(call)
                return tuple(ids), self._pool.decode(ids)
        except TurnoutError as error:
            return Failure(error)

    async def forget(self, tenant: str) -> None:
        """Drop what was learned of a tenant's texts."""
        self._pool.forget(tenant)

    async def close(self) -> None:
        """Free everything that the pool holds."""
        await self._pool.close()

    async def _answer(self, call: GenerateCall, put: Callable[[Event], None]) -> None:
        """Give all events of an answer to `put`; the last one is Usage or Failure."""
        events = self._pool.generate(call)
        try:
            with guarded(call.request_id):
                async for event in events:
                    put(event)
        except TurnoutError as error:
            put(await self._failure(error))
        finally:
            close = getattr(events, "aclose", None)
            if close is not None:
                await asyncio.shield(close())

    async def _failure(self, error: TurnoutError) -> Failure:
        """The end of an answer that failed."""
        return Failure(error)
