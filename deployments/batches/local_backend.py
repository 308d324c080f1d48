"""A pool in this process as a front end sees it: for jobs that answer requests without a server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from deployments.backend import Batch
from deployments.pool_deployment import PoolReplica
from turnout.calls import (
    Failure,
    GenerateCall,
    MethodDescription,
    ModelDescription,
    PoolStats,
    ScoreCall,
    ScoredTokens,
)
from turnout.embed_calls import EmbedCall, Embeddings

T = TypeVar("T")


class LocalBackend:
    """See `deployments.backend.Backend`.

    Args:
        replica: the pool.
    """

    def __init__(self, replica: PoolReplica) -> None:
        self._replica = replica

    async def stream(self, call: GenerateCall) -> AsyncGenerator[Batch, None]:
        """Batches of events, the last one ending in Usage."""
        async with aclosing(self._replica.stream(call)) as batches:
            async for batch in batches:
                _value(batch[-1])
                yield batch

    async def complete(self, call: GenerateCall) -> Batch:
        """The whole answer at once."""
        answer = await self._replica.complete(call)
        _value(answer[-1])
        return answer

    async def score(self, call: ScoreCall) -> list[ScoredTokens]:
        """Log-likelihood of each completion."""
        return _value(await self._replica.score(call))

    async def embed(self, call: EmbedCall) -> Embeddings:
        """Embeddings of texts."""
        return _value(await self._replica.embed(call))

    async def models(self) -> list[ModelDescription]:
        """The pool first, then its members."""
        return self._replica.models()

    async def methods(self) -> list[MethodDescription]:
        """Every registered decoding method."""
        return self._replica.methods()

    async def stats(self) -> list[PoolStats]:
        """What the pool holds right now."""
        return [self._replica.stats()]

    async def tokens(self, call: GenerateCall) -> tuple[tuple[int, ...], str]:
        """What a call gives its models to read, as token ids and as text."""
        return _value(await self._replica.tokens(call))

    async def forget(self, tenant: str) -> None:
        """Drop what was learned of a tenant's texts."""
        await self._replica.forget(tenant)


def _value(answer: T | Failure) -> T:
    if isinstance(answer, Failure):
        raise answer.error
    return answer
