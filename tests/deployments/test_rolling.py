"""Another configuration while calls come: no call fails, and what did not change stays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve

from deployments.app import QUIET, build_app
from deployments.pool_options import ingress_version, pool_version
from tests.deployments.conftest import poll
from tests.deployments.scripted_pool import expected, load_scripted, scripted_config
from tests.deployments.served_pool import ServedPool, call, read_one, served_pool
from turnout.config import TurnoutConfig

# The pool is one backend, which lives in one loop.
IN_ONE_LOOP = pytest.mark.asyncio(loop_scope="module")


def with_block_size(config: TurnoutConfig, size: int) -> TurnoutConfig:
    return config.model_copy(update={"engine": config.engine.model_copy(update={"block_size": size})})


def with_replicas(config: TurnoutConfig, count: int) -> TurnoutConfig:
    return config.model_copy(update={"pools": {"p": config.pools["p"].model_copy(update={"replicas": count})}})


@pytest.fixture(scope="module")
def pool(cluster: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    config = scripted_config(tmp_path_factory.mktemp("marks"), replicas=2)
    with served_pool("rolling-pool", config, load_scripted) as served:
        asyncio.run(served.wait_for_replicas(2))
        yield served


@IN_ONE_LOOP
async def test_no_call_fails_while_replicas_are_replaced(pool: ServedPool) -> None:
    before = await pool.pids()
    updated = asyncio.Event()
    served = 0

    async def client(place: int) -> None:
        """One call after the other, until the update is over."""
        nonlocal served
        turn = 0
        while not updated.is_set():
            seed, turn = 1000 * place + turn, turn + 1
            got = await read_one(pool.backend, call("step=0.02", f"c{seed}", seed=seed, max_tokens=25))
            assert got.ids == expected(seed, 25)
            served += 1

    clients = [asyncio.create_task(client(place)) for place in range(6)]
    long = asyncio.create_task(read_one(pool.backend, call("step=0.1", "long", max_tokens=300)))
    await asyncio.to_thread(pool.run, with_block_size(pool.config, 32))
    updated.set()
    await asyncio.gather(*clients)
    after = await pool.wait_for_replicas(2)
    assert not set(before) & set(after)
    assert served > 12
    got = await long
    assert got.ids == expected(5, 300)
    assert len(got.sources) > 1  # it took longer than a replica that is to stop is given


@IN_ONE_LOOP
async def test_what_does_not_concern_a_replica_leaves_it_alone(pool: ServedPool) -> None:
    before = await pool.pids()
    await asyncio.to_thread(pool.run, with_replicas(with_block_size(pool.config, 32), 3))
    assert set(before) < set(await pool.wait_for_replicas(3))


def test_versions_change_with_what_they_name(tmp_path: Path) -> None:
    config = scripted_config(tmp_path)
    version = pool_version("p", config, load_scripted)
    server = config.server.model_copy(update={"http_port": 1234})
    elsewhere = config.model_copy(update={"server": server})
    assert pool_version("p", elsewhere, load_scripted) == version
    assert ingress_version(elsewhere, load_scripted) != ingress_version(config, load_scripted)
    assert pool_version("p", with_block_size(config, 8), load_scripted) != version
    assert pool_version("p", config, asyncio.sleep) != version


@pytest.fixture(scope="module")
def url(cluster: tuple[TurnoutConfig, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = scripted_config(tmp_path_factory.mktemp("marks"))
    serve_whole(config)
    at = cluster[0].server
    yield f"http://{at.http_host}:{at.http_port}/rolling/v1/completions"
    serve.delete("rolling", _blocking=False)
    poll(lambda: "rolling" not in serve.status().applications, "the application is gone", 60.0)


def serve_whole(config: TurnoutConfig) -> None:
    serve.run(build_app(config, load_scripted), name="rolling", route_prefix="/rolling", logging_config=QUIET)


async def streamed(client: httpx.AsyncClient, url: str, seed: int, num_tokens: int) -> str:
    body = {"model": "p", "prompt": "step=0.02", "max_tokens": num_tokens, "seed": seed, "stream": True}
    async with client.stream("POST", url, json=body, timeout=60) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    assert not any("error" in event for event in events), events[-1]
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


async def test_clients_see_nothing_of_an_update_of_everything(url: str, tmp_path: Path) -> None:
    config = scripted_config(tmp_path)
    server = config.server.model_copy(update={"request_timeout_s": 50.0})
    other = with_block_size(config.model_copy(update={"server": server}), 32)
    updated = asyncio.Event()
    served = 0
    async with httpx.AsyncClient() as client:

        async def ask(place: int) -> None:
            nonlocal served
            turn = 0
            while not updated.is_set():
                seed, turn = 1000 * place + turn, turn + 1
                assert await streamed(client, url, seed, 50) == "".join(map(chr, expected(seed, 50)))
                served += 1

        clients = [asyncio.create_task(ask(place)) for place in range(4)]
        await asyncio.to_thread(serve_whole, other)
        updated.set()
        await asyncio.gather(*clients)
        assert await streamed(client, url, 7, 3) == "".join(map(chr, expected(7, 3)))
    assert served > 4
