"""A served pool whose models run in actors: its replica is killed, and its answers go on in the next one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.pool_deployment import load_engine
from tests.deployments.served_pool import Got, ServedPool, kill, pid_of, read_one, served_pool, until
from turnout.calls import GenerateCall
from turnout.config import parse_config
from turnout.types import SamplingParams


@pytest.fixture(scope="module")
def pool(cluster: object) -> Iterator[ServedPool]:
    config = parse_config(
        {
            "models": {"m": {"path": "demo:small", "dtype": "float32", "kv_memory_bytes": 16 << 20}},
            "pools": {"p": {"small": "m", "large": "m", "placement": {"models": "actors"}}},
            "engine": {"threads": 1},
            "server": {"shutdown_grace_s": 1},
        }
    )
    with served_pool("actors", config, load_engine) as served:
        asyncio.run(served.wait_for_replicas(1))
        yield served


def asked() -> GenerateCall:
    sampling = SamplingParams(max_tokens=400, seed=3, temperature=0.8, ignore_eos=True)
    return GenerateCall("r", "p", sampling, prompt="Question:", method="plain", deadline_s=200.0)


async def test_a_lost_replica_takes_its_actors_along_and_its_answer_goes_on(pool: ServedPool) -> None:
    undisturbed = await read_one(pool.backend, asked())
    [stats] = await pool.stats()
    replica = pid_of(stats.place)
    [actor] = {int(re.findall(r"\d+", member.place)[-1]) for member in stats.members}
    assert actor != replica
    killed = asyncio.Event()

    async def after(got: Got) -> None:
        if len(got.tokens) >= 4 and not killed.is_set():
            killed.set()
            kill(replica)

    got = await read_one(pool.backend, asked(), after)
    assert killed.is_set()
    assert got.ids == undisturbed.ids
    assert got.usage is not None
    assert "lost once" in got.usage.notes[-1]

    async def gone() -> bool:
        return not await asyncio.to_thread(Path(f"/proc/{actor}").exists)

    await until(gone, "the old replica's actor has ended")
    [stats] = await pool.stats()
    assert pid_of(stats.place) != replica
