"""Acceptance test 11: no request asks a Redis that is stopped (SIGSTOP) once that is known; it is used again after."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.fakes import RecordingStore
from kvstore.redis.nodes import parse_url
from kvstore.redis.redis_store import RedisStore
from tests.kvstore.acceptance.figures import compared
from tests.kvstore.acceptance.workers import CHUNK, Worker, prompt_of, working
from tests.kvstore.servers import RedisProcess, redis_server
from tests.telling import tell

PROMPTS = [prompt_of(4 * CHUNK + 1, start) for start in range(8)]
BUDGET_S, RECOVERY_S = 0.3, 40.0


@pytest.fixture
def process(tmp_path: Path) -> Iterator[RedisProcess]:
    with redis_server(tmp_path / "r", restricted=True) as running:
        yield running


@pytest.fixture
def client(process: RedisProcess) -> Iterator[RedisStore]:
    store = RedisStore(parse_url(process.unix_url), breaker_cooldown_s=0.5)
    try:
        yield store
    finally:
        store.close()


async def seconds_to_first_token(worker: Worker, prompt: list[int]) -> float:
    """Time to an answer's start, from an empty pool."""
    await worker.forget()
    seq = worker.sequence(prompt)
    began = time.perf_counter()
    await worker.model.extend(seq)
    took = time.perf_counter() - began
    worker.model.release(seq)
    return took


async def added(with_store: Worker, without: Worker, seconds: float, least: int) -> tuple[list[float], list[float]]:
    """Times with and without a store, in turns, so that whatever else the machine does happens to both."""
    times: tuple[list[float], list[float]] = ([], [])
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times[0]) < least:
        prompt = PROMPTS[len(times[0]) % len(PROMPTS)]
        pair = (with_store, without) if len(times[0]) % 2 else (without, with_store)
        took = {each: await seconds_to_first_token(each, prompt) for each in pair}
        times[0].append(took[with_store])
        times[1].append(took[without])
    return times


def is_of_value(key: bytes) -> bool:
    """What requests and writers ask for; maintenance, which no request waits for, keeps trying."""
    return key.count(b":") == 5


async def test_nobody_asks_a_stopped_redis_and_it_is_used_again(process: RedisProcess, client: RedisStore) -> None:
    calls = RecordingStore(client)
    async with working(calls, fetch_timeout_s=BUDGET_S) as worker:
        await _fill(worker)
        process.pause()
        try:
            await _until_it_is_noticed(worker)
            await worker.settle()
            before = len(calls.calls)
            for prompt in PROMPTS:
                await worker.forget()
                assert (await worker.answer(prompt)).fetched == 0
            assert [call for call in calls.calls[before:] if any(map(is_of_value, call.keys))] == []
        finally:
            process.resume()
        await _recovery(worker)


@pytest.mark.chaos
async def test_a_minute_of_a_stopped_redis(process: RedisProcess, client: RedisStore) -> None:
    """Requests are answered without it all the while; what it adds to their first token is printed."""
    async with working(client, fetch_timeout_s=BUDGET_S) as worker, working(None) as without:
        await _fill(worker)
        process.pause()
        stopped = time.monotonic()
        try:
            await _until_it_is_noticed(worker)
            while time.monotonic() - stopped < 60.0:
                times = await added(worker, without, 15.0, 300)
                compared("time to first token while Redis is stopped for a minute", *times)
                assert worker.store.health() != "ok"
            await worker.forget()
            for prompt in PROMPTS:
                assert (await worker.answer(prompt)).fetched == 0
            assert worker.store.stats().faults
        finally:
            process.resume()
        tell(f"full service {await _recovery(worker):.2f} s after the end of a pause of a minute")


async def _fill(worker: Worker) -> None:
    for prompt in PROMPTS:
        await worker.answer(prompt)
    await worker.forget()
    assert (await worker.answer(PROMPTS[0])).fetched == 4 * CHUNK


async def _recovery(worker: Worker) -> float:
    """Seconds until every prompt is served from Redis and health is ok."""
    began = time.monotonic()
    async with asyncio.timeout(RECOVERY_S):
        while True:
            await worker.forget()
            got = [await worker.answer(prompt) for prompt in PROMPTS]
            if worker.store.health() == "ok" and [each.fetched for each in got] == [4 * CHUNK] * len(PROMPTS):
                return time.monotonic() - began


async def _until_it_is_noticed(worker: Worker) -> None:
    """No request waits longer than its budget meanwhile."""
    for _ in range(20):
        await worker.forget()
        async with asyncio.timeout(BUDGET_S + 4.0):
            await worker.answer(PROMPTS[1])
        if worker.store.health() == "off":
            return
    raise AssertionError("the breaker did not open")
