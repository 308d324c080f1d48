"""A pool replica as a Backend without Ray: what RemoteBackend does, minus the hops."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from deployments.backend import Batch
from deployments.metrics import Metrics
from deployments.pool_deployment import PoolReplica
from deployments.service import GenerationService
from tests.deployments.fake_pool import load_fake_pool
from turnout.calls import Failure, GenerateCall, MethodDescription, ModelDescription, PoolStats, ScoreCall
from turnout.config import TurnoutConfig, parse_config
from turnout.embed_calls import EmbedCall, TaskCall


class InProcessBackend:
    def __init__(self, replica: PoolReplica) -> None:
        self.replica = replica

    async def stream(self, call: GenerateCall) -> AsyncGenerator[Batch, None]:
        async with aclosing(self.replica.stream(call)) as batches:
            async for batch in batches:
                if isinstance(batch[-1], Failure):
                    if batch[:-1]:
                        yield batch[:-1]
                    raise batch[-1].error
                yield batch

    async def complete(self, call: GenerateCall) -> Batch:
        answer = await self.replica.complete(call)
        _open(answer[-1])
        return answer

    async def score(self, call: ScoreCall) -> Any:
        return _open(await self.replica.score(call))

    async def embed(self, call: EmbedCall) -> Any:
        return _open(await self.replica.embed(call))

    async def task(self, call: TaskCall) -> Any:
        return _open(await self.replica.task(call))

    async def models(self) -> list[ModelDescription]:
        return self.replica.models()

    async def methods(self) -> list[MethodDescription]:
        return [MethodDescription("plain", "One model.", (), True, {"type": "object"})]

    async def parts(self, slots: frozenset[str]) -> dict[str, dict[str, Any]]:
        return self.replica.parts(slots)

    async def stats(self) -> list[PoolStats]:
        return [self.replica.stats()]

    async def tokens(self, call: GenerateCall) -> Any:
        return _open(await self.replica.tokens(call))

    async def forget(self, tenant: str) -> None:
        await self.replica.forget(tenant)


def _open(value: Any) -> Any:
    if isinstance(value, Failure):
        raise value.error
    return value


def make_config(**server: Any) -> TurnoutConfig:
    return parse_config(
        {
            "models": {"small": {"path": "none"}, "large": {"path": "none"}},
            "pools": {"demo": {"small": "small", "large": "large"}},
            "server": server,
        }
    )


def make_service(**server: Any) -> GenerationService:
    config = make_config(**server)
    replica = PoolReplica("demo", config, load_fake_pool)
    return GenerationService(config, {"demo": InProcessBackend(replica)}, Metrics())
