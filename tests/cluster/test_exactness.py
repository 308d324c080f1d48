"""The same seeded requests give the same tokens wherever a pool's models run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from actors.pool import ActorPool
from pool.local_pool import LocalPool
from tests.actors.hosts import poll
from tests.cluster.placements import (
    PLACEMENTS,
    as_method,
    assert_all_same,
    assert_same,
    by_large_alone,
    nodes_of,
    placed,
    seeded_calls,
)
from tests.engine.harness import Reply, answer, ask_all
from turnout.calls import GenerateCall
from turnout.config import TurnoutConfig

# One loop for all: the pools belong to it. Starting processes takes its time on a machine that is busy.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

COUNTS = [pytest.param(24, id="24"), pytest.param(200, id="200", marks=pytest.mark.exactness)]
AT_ONCE = 16
# Small tensors go from actor to actor too, as those of large models do.
HOST = "tests.actors.hosts:StoringWorker"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def colocated(config: TurnoutConfig) -> AsyncIterator[LocalPool]:
    """The pool in this process."""
    pool = LocalPool.load("pair", config)
    yield pool
    await pool.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=PLACEMENTS)
async def elsewhere(config: TurnoutConfig, raylets: None, request: pytest.FixtureRequest) -> AsyncIterator[ActorPool]:
    """The pool in actors, where the placement puts them."""
    pool = ActorPool.load("pair", placed(config, request.param), host=HOST)
    _, ranks, fewest = PLACEMENTS[request.param]
    try:
        assert sum(len(each._life.places) for each in pool.supervisors) == 1 + ranks
        assert len(nodes_of(pool)) >= fewest
        yield pool
        await poll(lambda: (pool.stats().sequences, pool.stats().used_blocks) == (0, 0), "the actors hold nothing", 60)
    finally:
        await pool.close()  # Ray ends this process where it is shut down under an open stream


async def answers(pool: LocalPool | ActorPool, calls: list[GenerateCall]) -> list[Reply]:
    """In order, `AT_ONCE` of them at a time."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(call: GenerateCall) -> Reply:
        async with room:
            return await answer(pool, call)  # type: ignore[arg-type]

    return list(await asyncio.gather(*(one(call) for call in calls)))


@pytest.mark.parametrize("count", COUNTS)
async def test_the_same_requests_give_the_same_tokens(
    colocated: LocalPool, elsewhere: ActorPool, pair_folder: Path, count: int
) -> None:
    calls = seeded_calls(count)
    expected, got = await answers(colocated, calls), await answers(elsewhere, calls)
    assert sum(len(reply.ids) for reply in expected) > 8 * count
    assert_all_same(pair_folder, calls, expected, got)


@pytest.mark.parametrize("count", COUNTS)
async def test_pearl_gives_what_the_large_model_gives_alone(
    colocated: LocalPool, elsewhere: ActorPool, pair_folder: Path, count: int
) -> None:
    calls = [call for call in seeded_calls(4 * count) if by_large_alone(call)][:count]
    assert len(calls) == count
    alone = [as_method(call, "plain", model="large") for call in calls]
    overlapped = [as_method(call, "pearl", verifier="match") for call in calls]
    expected, got = await answers(colocated, alone), await answers(elsewhere, overlapped)
    assert_all_same(pair_folder, overlapped, expected, got)
    assert sum(reply.usage.speculation.accepted_tokens for reply in got) > 0


async def test_a_wrong_token_is_seen(colocated: LocalPool, pair_folder: Path) -> None:
    calls = [replace(call, sampling=call.sampling.model_copy(update={"max_tokens": 6})) for call in seeded_calls(24)]
    for call, reply in zip(calls, await ask_all(colocated, calls), strict=True):
        assert_same(pair_folder, call, reply, reply)
        for place, token in enumerate(reply.tokens):
            wrong = [*reply.tokens]
            wrong[place] = replace(token, id=(token.id + 1) % 256)
            with pytest.raises(AssertionError):
                assert_same(pair_folder, call, reply, replace(reply, answers=[wrong]))
