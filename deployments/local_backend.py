"""A pool in this process as a front end sees it: no replica of it is asked."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeVar

from deployments.backend import Batch
from deployments.pool_answers import PoolAnswers
from turnout.calls import (
    Failure,
    GenerateCall,
    MethodDescription,
    ModelDescription,
    PoolStats,
    ScoreCall,
    ScoredTokens,
)
from turnout.embed_calls import EmbedCall, Embeddings, TaskAnswer, TaskCall

T = TypeVar("T")


class LocalBackend:
    """The `Backend` of a pool in this process.

    Args:
        answers: of the pool.
    """

    def __init__(self, answers: PoolAnswers) -> None:
        self._answers = answers

    async def stream(self, call: GenerateCall) -> AsyncGenerator[Batch, None]:
        """Batches of events, the last one ending in Usage."""
        async with aclosing(self._answers.stream(call)) as batches:
            async for batch in batches:
                *events, last = batch
                if isinstance(last, Failure):
                    if events:
                        yield tuple(events)
                    raise last.error
                yield batch

    async def complete(self, call: GenerateCall) -> Batch:
        """The whole answer at once."""
        answer = await self._answers.complete(call)
        _value(answer[-1])
        return answer

    async def score(self, call: ScoreCall) -> list[ScoredTokens]:
        """Log-likelihood of each completion."""
        return _value(await self._answers.score(call))

    async def embed(self, call: EmbedCall) -> Embeddings:
        """Embeddings of texts."""
        return _value(await self._answers.embed(call))

    async def task(self, call: TaskCall) -> TaskAnswer:
        """Carry out a task."""
        return _value(await self._answers.task(call))

    async def models(self) -> list[ModelDescription]:
        """The pool first, then its members."""
        return self._answers.models()

    async def methods(self) -> list[MethodDescription]:
        """Every registered decoding method."""
        return self._answers.methods()

    async def parts(self, slots: frozenset[str]) -> dict[str, dict[str, Any]]:
        """JSON schemas of parts: by slot, then by name."""
        return self._answers.parts(slots)

    async def stats(self) -> list[PoolStats]:
        """What the pool holds right now."""
        return [self._answers.stats()]

    async def tokens(self, call: GenerateCall) -> tuple[tuple[int, ...], str]:
        """What a call gives its models to read, as token ids and as text."""
        return _value(await self._answers.tokens(call))

    async def forget(self, tenant: str) -> None:
        """Drop what was learned of a tenant's texts."""
        await self._answers.forget(tenant)

    async def close(self) -> None:
        """Free everything that the pool holds."""
        await self._answers.close()


def _value(answer: T | Failure) -> T:
    if isinstance(answer, Failure):
        raise answer.error
    return answer
