"""Two replicas that are served: prompts gather where they are cached, spread where that costs less, sessions stay."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.deployments.scripted_pool import load_scripted, scripted_config
from tests.deployments.served_pool import ServedPool, call, read_one, served_pool, until
from tests.deployments.test_replica_choice import LONG

# The pool is one backend, which lives in one loop.
IN_ONE_LOOP = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def pool(cluster: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    routing = {"policy": {"name": "static"}, "sticky": {}}
    config = scripted_config(tmp_path_factory.mktemp("marks"), replicas=2, routing=routing)
    with served_pool("choice", config, load_scripted) as served:
        asyncio.run(served.wait_for_replicas(2))
        yield served


@IN_ONE_LOOP
async def test_served_prompts_gather_and_spread(pool: ServedPool) -> None:
    async def where(prompt: str, **changes: Any) -> str:
        got = await read_one(pool.backend, call(prompt, f"{prompt[-12:]}{changes}", **changes))
        return got.sources[0]

    async def gathered() -> bool:
        """Both replicas are known to what routes, and the prompt stays on one of them."""
        return len({await where(f"{LONG} step=0.001 {i}", max_tokens=2) for i in range(6)}) == 1

    await until(gathered, "a prompt stays where it is cached")

    async def spread() -> bool:
        """Once it is known what such calls cost: how many go elsewhere, the cases made by hand above say."""
        return len(set(await asyncio.gather(*[where(f"{LONG} step=0.05 {i}", max_tokens=20) for i in range(24)]))) == 2

    await until(spread, "a replica that is busier than reading the prompt again costs is passed over")
    assert len({await where("step=0.001", max_tokens=2, session=f"s{i % 3}") for i in range(12)}) <= 2


@IN_ONE_LOOP
async def test_a_served_session_stays_on_its_replica_under_load(pool: ServedPool) -> None:
    first = (await read_one(pool.backend, call("step=0.001", session="mine", max_tokens=2))).sources
    load = [asyncio.create_task(read_one(pool.backend, call("step=0.02", f"l{i}", session="mine"))) for i in range(10)]
    later = [(await read_one(pool.backend, call(f"step=0.001 {i}", session="mine", max_tokens=2))) for i in range(5)]
    assert {source for got in later for source in got.sources} == set(first)
    assert {source for got in await asyncio.gather(*load) for source in got.sources} == set(first)
