"""Replicas that come with the load and go without it, down to none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from deployments.metrics import Metrics
from deployments.service import GenerationService
from tests.deployments.scripted_pool import expected, load_scripted, scripted_config
from tests.deployments.served_pool import ServedPool, call, read_one, served_pool
from turnout.errors import Code, TurnoutError

# The module's pool is one backend, which lives in one loop.
pytestmark = pytest.mark.asyncio(loop_scope="module")

SCALING = {
    "min_replicas": 0,
    "max_replicas": 2,
    "target_requests": 3,
    "upscale_delay_s": 0.2,
    "downscale_delay_s": 1,
    "idle_s": 1,
}


@pytest.fixture(scope="module")
def pool(cluster: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    config = scripted_config(tmp_path_factory.mktemp("marks"), autoscaling=SCALING)
    with served_pool("zero", config, load_scripted) as served:
        yield served


async def test_idle_it_has_none_and_a_call_waits_for_a_cold_start(pool: ServedPool) -> None:
    await pool.wait_for_replicas(0)
    service = GenerationService(pool.config, {"p": pool.backend}, Metrics())
    assert await service.health() == "ok"
    assert await service.stats() == {"p": []}
    with pytest.raises(TurnoutError) as late:
        await service.generate(call("step=0", deadline_s=0.2))
    assert (late.value.code, late.value.field) == (Code.DEADLINE_EXCEEDED, "deadline_s")
    started = time.monotonic()
    got = await read_one(pool.backend, call("step=0", max_tokens=5))
    assert got.ids == expected(5, 5)
    assert got.usage is not None
    assert got.usage.notes == ()  # a wait, not a loss
    assert time.monotonic() - started < 45


async def test_what_it_is_asked_for_decides_how_many(pool: ServedPool) -> None:
    calls = [call("step=0.1", f"r{i}", seed=i, max_tokens=150) for i in range(6)]
    answers = [asyncio.create_task(read_one(pool.backend, each)) for each in calls]
    await pool.wait_for_replicas(2)
    for i, got in enumerate(await asyncio.gather(*answers)):
        assert got.ids == expected(i, 150)
    await pool.wait_for_replicas(0)
