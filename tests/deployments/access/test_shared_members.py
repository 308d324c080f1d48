"""A model that is a member of several pools: each tenant gets it from one that it may ask."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.access.callers import Caller
from deployments.backend import Batch
from deployments.fan_out import answer
from deployments.metrics import Metrics
from deployments.pool_deployment import PoolReplica
from deployments.schemas import completion_job
from deployments.service import GenerationService
from tests.deployments.access.kit import House, house_config, write_house
from tests.deployments.fake_pool import load_fake_pool
from tests.deployments.in_process import InProcessBackend
from turnout.access_config import TenantLimits
from turnout.calls import GenerateCall, ScoreCall
from turnout.errors import Code, TurnoutError
from turnout.types import SamplingParams

TENANTS: dict[str, dict[str, Any]] = {
    "first": {"pools": ["demo"]}, "second": {"pools": ["oth*"]}, "both": {}, "none": {"pools": []}
}  # fmt: skip


class Noting(InProcessBackend):
    """Notes what it is asked."""

    def __init__(self, replica: PoolReplica) -> None:
        super().__init__(replica)
        self.asked: list[str] = []

    async def stream(self, call: GenerateCall) -> AsyncGenerator[Batch, None]:
        self.asked.append("stream")
        async with aclosing(super().stream(call)) as batches:
            async for batch in batches:
                yield batch

    async def score(self, call: ScoreCall) -> Any:
        self.asked.append("score")
        return await super().score(call)

    async def tokens(self, call: GenerateCall) -> Any:
        self.asked.append("tokens")
        return await super().tokens(call)


class SharedHouse(House):
    """`large` is a member of both pools."""

    @property
    def asked(self) -> dict[str, list[str]]:
        backends = self.service._backends.items()
        return {name: backend.asked for name, backend in backends if isinstance(backend, Noting)}


@pytest.fixture
def tenants(tmp_path: Path) -> Iterator[SharedHouse]:
    keys = write_house(tmp_path, TENANTS)
    config = house_config(tmp_path)
    other = config.pools["other"].model_copy(update={"large": "large"})
    config = config.model_copy(update={"pools": {**config.pools, "other": other}})
    backends = {name: Noting(PoolReplica(name, config, load_fake_pool)) for name in config.pools}
    service = GenerationService(config, backends, Metrics())
    yield SharedHouse(service, keys, tmp_path)
    service.close()


def call(tenant: str) -> GenerateCall:
    return GenerateCall("r1", model="large", prompt="hello", sampling=SamplingParams(max_tokens=4), tenant=tenant)


@pytest.mark.parametrize(("tenant", "pool"), [("first", "demo"), ("second", "other"), ("both", "demo")])
async def test_it_is_answered_by_a_pool_that_its_tenant_may_ask(tenants: SharedHouse, tenant: str, pool: str) -> None:
    service = tenants.service
    assert (await service.generate(call(tenant))).choices[0].text == "abcd"
    assert [batch async for batch in service.stream(call(tenant))]
    assert await service.score(ScoreCall("r2", model="large", prompt="hello", completions=("a",), tenant=tenant))
    body = {"model": "large", "prompt": [65, 66], "echo": True, "logprobs": 1, "max_tokens": 2}
    job = completion_job(body).named("r3")
    caller = Caller(tenant, TenantLimits.model_validate(TENANTS[tenant]))
    chunks, _ = await answer(service, replace(job, calls=tuple(map(caller.attributed, job.calls))))
    assert chunks[0].text == "ABab"
    assert {name for name, asked in tenants.asked.items() if asked} == {pool}
    assert {"stream", "score", "tokens"} <= set(tenants.asked[pool])
    assert "large" in [model.name for model in await service.models_for(caller)]


async def test_who_may_ask_no_pool_that_has_it_is_refused(tenants: SharedHouse) -> None:
    with pytest.raises(TurnoutError, match="may not ask pool 'demo'") as refusal:
        await tenants.service.generate(call("none"))
    assert refusal.value.code is Code.PERMISSION_DENIED
    assert not any(tenants.asked.values())
