"""Replicas that are told to stop while they answer: their calls go on in those that stay."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployments.scripted_pool import expected, load_scripted, scripted_config
from tests.deployments.served_pool import ServedPool, call, read_one, served_pool, until

GRACE_S = 12.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("marks")


@pytest.fixture
def pool(cluster: object, folder: Path) -> Iterator[ServedPool]:
    with served_pool("drain", scripted_config(folder, GRACE_S, replicas=2), load_scripted) as served:
        asyncio.run(served.wait_for_replicas(2))
        yield served


async def begun(pool: ServedPool, calls: int) -> None:
    async def all_run() -> bool:
        requests = [each.requests for each in await pool.stats()]
        return len(requests) == 2 and min(requests) > 0 and sum(requests) >= calls

    await until(all_run, "both replicas have calls")


async def test_calls_of_a_replica_that_stops_are_handed_over(pool: ServedPool, folder: Path) -> None:
    long = [call("step=0.1", f"long{i}", seed=i, max_tokens=120) for i in range(6)]
    short = [call("step=0.05", f"short{i}", seed=i, max_tokens=30) for i in range(6)]
    answers = [asyncio.create_task(read_one(pool.backend, each)) for each in (*long, *short)]
    await begun(pool, len(long))
    before = await pool.pids()
    await asyncio.to_thread(pool.run, scripted_config(folder, GRACE_S, replicas=1))
    [left] = await pool.wait_for_replicas(1)
    [gone] = set(before) - {left}
    got = await asyncio.gather(*answers)
    for place, each in enumerate(got):
        assert each.ids == expected(place % 6, 120 if place < 6 else 30)
    moved = [each for each in got if len(each.sources) > 1]
    assert moved
    assert all(each.sources == [f"pid {gone}", f"pid {left}"] for each in moved)
    assert (folder / f"handed-{gone}").exists()  # asked, not killed
    assert all(len(each.sources) == 1 for each in got[6:])  # what is done in time stays


async def test_many_moves_are_nobodys_fault(pool: ServedPool, folder: Path) -> None:
    """A call whose replica is told to stop is neither a suspect nor blamed, however often that happens to it."""
    asked = asyncio.create_task(read_one(pool.backend, call("step=0.2", "long", max_tokens=150)))
    for count in (1, 2, 1, 2):
        await asyncio.to_thread(pool.run, scripted_config(folder, 1.0, replicas=count))
        await pool.wait_for_replicas(count)
    got = await asked
    assert got.ids == expected(5, 150)
