"""A model split over two real actors: when a rank is killed all are started again, and nobody's tokens change."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from actors.pool import ActorPool
from tests.actors.hosts import open_local, poll
from tests.engine.harness import answer, call_of
from turnout.cluster_config import PlacementConfig
from turnout.config import TurnoutConfig

# Starting processes takes its time on a machine that is busy.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

CALLS = [
    call_of([3, 1, 4, 1, 5, 9, 2, 6], "plain", temperature=0.9, max_tokens=96, ignore_eos=True),
    call_of([2, 7, 1, 8, 2, 8], "plain", max_tokens=96, ignore_eos=True),
]


@pytest.fixture(scope="module")
def whole(actors_config: TurnoutConfig) -> TurnoutConfig:
    """The large model alone, in one piece."""
    pool = actors_config.pools["pair"].model_copy(update={"small": "large"})
    return actors_config.model_copy(update={"pools": {"pair": pool}})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def split(whole: TurnoutConfig, ray_cluster: None) -> AsyncIterator[ActorPool]:
    placement = PlacementConfig(models="actors", cpus=0.5, threads=1, start_timeout_s=240.0, join_timeout_s=120.0)
    pool = whole.pools["pair"].model_copy(update={"placement": placement})
    large = whole.models["large"].model_copy(update={"tensor_parallel": 2})
    config = whole.model_copy(update={"pools": {"pair": pool}, "models": {**whole.models, "large": large}})
    loaded = ActorPool.load("pair", config)
    yield loaded
    await loaded.close()


async def test_a_rank_that_is_killed_is_replaced_with_all_others(split: ActorPool, whole: TurnoutConfig):
    local = open_local(whole)
    wanted = [(await answer(local, call)).ids for call in CALLS]
    await local.close()
    (supervisor,) = split.supervisors
    leader, follower = (place.pid for place in supervisor._life.places)
    assert leader != follower
    tasks = [asyncio.create_task(answer(split, call)) for call in CALLS]  # type: ignore[arg-type]
    await poll(lambda: len(supervisor._sent) == 2, "it works", 60)
    os.kill(follower, signal.SIGKILL)
    assert [reply.ids for reply in await asyncio.gather(*tasks)] == wanted
    assert supervisor.restarts == 1
    assert not {leader, follower} & {place.pid for place in supervisor._life.places}
    await poll(lambda: split.stats().used_blocks == 0, "the pool is idle", 60)
