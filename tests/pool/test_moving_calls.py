"""Calls that stop in one pool and go on in another: the client sees the undisturbed answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pool.local_pool import LocalPool
from tests.engine.harness import answer, ask_all, call_of, pair_config, until
from tests.engine.pools import _opened
from tests.pool.resuming import METHODS, Client, run
from turnout.errors import Code, Interrupted, TurnoutError
from turnout.part_choice import PartChoice

# One loop for all: the models' locks belong to it.
pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [*b"ab ab. ab ab, ab 7.5 ab ab"]
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 5, "max_tokens": 40, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replicas(pair_folder: Path) -> AsyncIterator[list[LocalPool]]:
    """Two replicas of one pool."""
    config = pair_config(pair_folder, block_size=8, token_budget=48)
    async for one in _opened(LocalPool.load("pair", config)):
        async for two in _opened(LocalPool.load("pair", config)):
            yield [one, two]


async def _as_new(pool: LocalPool) -> AsyncIterator[LocalPool]:
    """A pool in which nothing is cached and nothing may be left."""
    for engine in pool.engines.values():
        engine.pool.clear_cached()
    yield pool
    await until(lambda: pool.stats().used_blocks == 0)
    assert (pool.stats().sequences, pool.stats().waiting, pool.stats().requests) == (0, 0, 0)
    for engine in pool.engines.values():
        engine.pool.check_integrity()


@pytest_asyncio.fixture(loop_scope="module")
async def pool(replicas: list[LocalPool]) -> AsyncIterator[LocalPool]:
    async for opened in _as_new(replicas[0]):
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def other(replicas: list[LocalPool]) -> AsyncIterator[LocalPool]:
    """Another replica of `pool`."""
    async for opened in _as_new(replicas[1]):
        yield opened


@pytest.mark.parametrize(
    ("name", "params", "resumable"), METHODS, ids=["-".join([n, *map(str, p.values())]) for n, p, _ in METHODS]
)
async def test_a_call_moves_to_and_fro(
    pool: LocalPool, other: LocalPool, name: str, params: dict[str, Any], resumable: bool
) -> None:
    call = call_of(PROMPT, name, params, **SAMPLED)
    whole = await answer(pool, call)
    client, moved, pools, moves = Client.of(call), None, [pool, other], 0
    while client.usage is None:
        before = len(client.ids[0])
        moved = await run(pools[moves % 2], replace(call, moved=moved), client, 2, again=True)
        moves += 1
        assert moved is None or len(client.ids[0]) > before or client.ended[0]
    assert client.ids[0] == whole.ids
    assert client.texts[0] == whole.text
    assert client.usage.completion_tokens == len(whole.ids)
    if resumable:
        assert moves > 3
        assert sum(meter.generated_tokens for meter in client.usage.models.values()) == len(whole.ids)
        assert client.usage.models.keys() == whole.usage.models.keys()
        assert any(note.startswith("moved here with the cache of ") for note in client.usage.notes)


async def test_what_was_cached_is_not_computed_again(pool: LocalPool, other: LocalPool) -> None:
    call = call_of([*PROMPT, *PROMPT], "plain", **SAMPLED)
    client = Client.of(call)
    moved = await run(pool, call, client, 4)
    assert moved is not None
    [cache] = moved.caches
    assert (cache.model, cache.start) == ("large", 0)
    assert cache.nbytes == cache.kv.nbytes > 0
    assert len(cache.ids) == cache.kv.shape[1] >= len(PROMPT) * 2 + len(client.ids[0]) - 1
    before = moved.meters[0].models["large"].processed_tokens
    left = SAMPLED["max_tokens"] - len(client.ids[0])
    assert await run(other, replace(call, moved=moved), client, None) is None
    assert client.usage is not None
    after = client.usage.models["large"].processed_tokens
    assert left <= after - before <= left + 8
    assert client.ids[0] == (await answer(other, call)).ids


async def test_what_a_contrast_took_is_counted_where_it_moves_to(pool: LocalPool, other: LocalPool) -> None:
    contrast = PartChoice.of("cad", alpha=2.0)
    call = replace(call_of("ab. ab", "plain", **SAMPLED), contrast=contrast, context="ab 7.5 ab")
    whole, client = await answer(pool, call), Client.of(call)
    moved = await run(pool, call, client, 4)
    assert moved is not None
    here = [moved.meters[0], moved.stream_meter]
    assert all(each.models["large"].processed_tokens > 0 for each in here)
    left = SAMPLED["max_tokens"] - len(client.ids[0])
    assert await run(other, replace(call, moved=moved), client, None) is None
    assert client.ids[0] == whole.ids != (await answer(other, replace(call, contrast=None))).ids
    assert client.usage is not None
    after = client.usage.models["large"]
    assert after.processed_tokens >= sum(each.models["large"].processed_tokens for each in here) + 2 * left - 2
    assert after.generated_tokens == len(whole.ids)


async def test_without_caches_it_is_computed(pool: LocalPool, other: LocalPool) -> None:
    call = call_of(PROMPT, "speculative", {"length": "fixed"}, **SAMPLED)
    whole = await answer(other, call)
    other.engines["large"].pool.clear_cached()
    for keep in (0, 1):
        client = Client.of(call)
        moved = await run(pool, call, client, 3)
        assert moved is not None
        assert {cache.model for cache in moved.caches} == {"small", "large"}
        moved = replace(moved, caches=moved.caches[:keep])
        assert await run(other, replace(call, moved=moved), client, None) is None
        assert client.ids[0] == whole.ids


@pytest.mark.parametrize("fault", ["digest", "ids", "model", "shape", "lost", "answer"])
async def test_a_cache_that_does_not_belong_here_is_left_out(pool: LocalPool, other: LocalPool, fault: str) -> None:
    """Values of other weights or other tokens would be wrong: here they are random, and must not be used."""
    call = call_of([*PROMPT, *PROMPT], "plain", **SAMPLED)
    whole = await answer(pool, call)
    client = Client.of(call)
    moved = await run(pool, call, client, 3)
    assert moved is not None
    [cache] = moved.caches
    noise = cache.kv.clone().normal_()
    wrong = {
        "digest": replace(cache, digest="another", kv=noise),
        "ids": replace(cache, ids=(9, *cache.ids[1:]), kv=noise),
        "model": replace(cache, model="medium", kv=noise),
        "shape": replace(cache, kv=noise[:1]),
        "lost": replace(cache, kv=None),
        "answer": replace(cache, answer=7, kv=noise),
    }[fault]
    assert await run(other, replace(call, moved=replace(moved, caches=(wrong,))), client, None) is None
    assert client.ids[0] == whole.ids
    assert client.usage is not None
    assert "moved here with the cache of 0 tokens" in client.usage.notes


async def test_wrong_values_under_the_right_name_would_be_found(pool: LocalPool, other: LocalPool) -> None:
    """The planted fault: that what came is used at all."""
    call = call_of([*PROMPT, *PROMPT], "plain", **SAMPLED)
    whole = await answer(pool, call)
    client = Client.of(call)
    moved = await run(pool, call, client, 3)
    assert moved is not None
    noisy = tuple(replace(cache, kv=cache.kv.clone().normal_()) for cache in moved.caches)
    await run(other, replace(call, moved=replace(moved, caches=noisy)), client, None)
    assert client.ids[0] != whole.ids
    other.engines["large"].pool.clear_cached()


async def test_several_answers_move_with_one_prompt(pool: LocalPool, other: LocalPool) -> None:
    call = call_of([*PROMPT, *PROMPT], "plain", n=3, **SAMPLED)
    whole = await answer(pool, call)
    client = Client.of(call)
    moved = await run(pool, call, client, 9)
    assert moved is not None
    assert [cache.start for cache in moved.caches] == [0, 48, 48]
    assert [cache.answer for cache in moved.caches] == [0, 1, 2]
    assert await run(other, replace(call, moved=moved), client, None) is None
    assert client.ids == [[token.id for token in tokens] for tokens in whole.answers]
    assert client.texts == whole.texts
    assert client.usage is not None
    assert client.usage.models["large"].generated_tokens == 3 * SAMPLED["max_tokens"]


async def test_an_answer_that_ended_stays_with_its_client(pool: LocalPool, other: LocalPool) -> None:
    # The first answer ends after several runs of steps, so that the second one has begun, and has several to come.
    sampled = {**SAMPLED, "max_tokens": 240}
    whole = await answer(pool, call_of(PROMPT, "plain", n=2, **sampled))
    first, second = ([token.id for token in tokens] for tokens in whole.answers)
    ends = next(token for token in first[64:160] if token not in {*first[:64], *second})
    call = call_of(PROMPT, "plain", n=2, **sampled, stop_token_ids=(ends,))
    whole = await answer(pool, call)
    client, moved = Client.of(call), None
    try:
        async for event in pool.generate(call):
            client.take(event)
            if client.ended[0] and not client.ended[1]:
                pool.hand_over()
    except Interrupted as error:
        moved = error.moved
    assert moved is not None
    assert {cache.answer for cache in moved.caches} == {1}
    assert await run(other, replace(call, moved=moved), client, None) is None
    assert client.ids == [[token.id for token in tokens] for tokens in whole.answers]
    assert client.usage is not None
    assert client.usage.models["large"].generated_tokens == sum(map(len, whole.answers))


async def test_everybody_leaves_between_two_tokens(pool: LocalPool, other: LocalPool) -> None:
    """All calls of a pool at once, at many moments; some would be made again, and stay."""
    calls = [
        call_of(PROMPT[place:], name, params, **{**SAMPLED, "seed": place})
        for place, (name, params, _) in enumerate(METHODS)
    ]
    whole = await ask_all(other, calls)
    for moment in range(1, 26, 6):
        clients = [Client.of(call) for call in calls]
        running = [
            asyncio.ensure_future(run(pool, call, client, None)) for call, client in zip(calls, clients, strict=True)
        ]
        for _ in range(moment * 8):
            await asyncio.sleep(0)
        leaving = pool.hand_over()
        moved = await asyncio.gather(*running)
        assert sum(each is not None for each in moved) <= leaving
        assert all(each is None or resumable for each, (_, _, resumable) in zip(moved, METHODS, strict=True))
        rests = [
            run(other, replace(call, moved=each), client, None)
            for call, client, each in zip(calls, clients, moved, strict=True)
            if each is not None
        ]
        assert not any(await asyncio.gather(*rests))
        for client, expected in zip(clients, whole, strict=True):
            assert (client.ids[0], client.texts[0]) == (expected.ids, expected.text)
        assert pool.hand_over() == 0


async def test_who_would_be_made_again_stays_unless_told(pool: LocalPool) -> None:
    call = call_of(PROMPT, "random_switch", **SAMPLED)
    client = Client.of(call)
    assert await run(pool, call, client, 1) is None
    assert client.usage is not None
    client = Client.of(call)
    moved = await run(pool, call, client, 3, again=True)
    assert moved is not None
    assert all(len(cache.ids) <= len(PROMPT) for cache in moved.caches)
    assert all(meter.generated_tokens == 0 for meter in moved.meters[0].models.values())


async def test_the_deadline_and_a_leaving_client_still_hold(pool: LocalPool) -> None:
    turn = pool.engines["large"].batcher.device.turn
    late = call_of(PROMPT, "plain", **SAMPLED, deadline_s=2.0)

    async def leave_while_somebody_has_the_device() -> None:
        events = pool.generate(late)
        await anext(events)
        await turn.acquire()  # its cache cannot be read now
        assert pool.hand_over() == 1
        async for _ in events:
            pass

    with pytest.raises(TurnoutError) as failed:
        await leave_while_somebody_has_the_device()
    turn.release()
    assert failed.value.code is Code.DEADLINE_EXCEEDED
    assert pool.stats().sequences == 0
