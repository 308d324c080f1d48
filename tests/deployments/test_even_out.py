"""A replica comes while calls wait at another one: they go on in it, and need not wait for those before them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployments.scripted_pool import expected, load_scripted, scripted_config
from tests.deployments.served_pool import ServedPool, call, read_one, served_pool, until

PLACES = 2
CALLS = 5


@pytest.fixture
def pool(cluster: object, tmp_path: Path) -> Iterator[ServedPool]:
    config = scripted_config(tmp_path, replicas=1, max_ongoing_requests=PLACES, max_queued_requests=20)
    with served_pool("even", config, load_scripted) as served:
        yield served


async def test_waiting_calls_go_on_in_a_new_replica(pool: ServedPool) -> None:
    [first] = await pool.wait_for_replicas(1)
    # Those before them never end by themselves: who still waits for their places gets none.
    stuck = [asyncio.create_task(read_one(pool.backend, call("step=30", f"stuck{n}"))) for n in range(PLACES)]
    await until(lambda: _holds(pool, PLACES), "they have all the places")
    calls = [call("step=0.01", f"c{seed}", seed=seed) for seed in range(CALLS)]
    waiting = [asyncio.create_task(read_one(pool.backend, each)) for each in calls]
    await until(lambda: _holds(pool, PLACES + CALLS), "the others wait")
    settings = pool.config.pools["p"].model_copy(update={"replicas": 2})
    await asyncio.to_thread(pool.run, pool.config.model_copy(update={"pools": {"p": settings}}))
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*waiting)
    for seed, got in enumerate(answers):
        assert got.ids == expected(seed, 20)
        assert got.sources != [f"pid {first}"]
    for task in stuck:
        task.cancel()
    await asyncio.gather(*stuck, return_exceptions=True)


async def _holds(pool: ServedPool, count: int) -> bool:
    return await pool.requests() == count
