from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from kvstore.fakes import RecordingStore
from kvstore.lookup import fetcher
from kvstore.redis.redis_store import RedisStore
from tests.kvstore.prefixes import CHUNK, FOUR, Engine, fill, gated, soon, until


async def test_two_requests_share_one_read(store: RedisStore, opened: Any) -> None:
    await fill(store, FOUR)
    recording = RecordingStore(store)
    slow = gated(recording)
    engine = Engine(opened(slow))
    tasks = [asyncio.create_task(engine.find(FOUR)) for _ in range(4)]
    await until(lambda: slow.waiting)
    slow.gate.set()
    assert [len((await task).chunks) for task in tasks] == [4] * 4
    assert sum(len(call.sizes) for call in recording.named("read")) == 4
    assert len(engine.store.fetcher.reads) == 0


async def test_a_reader_that_leaves_does_not_take_others_with_it(store: RedisStore, opened: Any) -> None:
    await fill(store, FOUR)
    slow = gated(store)
    engine = Engine(opened(slow, connections=2))
    first = asyncio.create_task(engine.find(FOUR))
    await until(lambda: slow.waiting)
    second = asyncio.create_task(engine.find(FOUR))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await until(lambda: slow.waiting == 2)  # the second took over
    slow.gate.set()
    assert len((await second).chunks) == 4
    assert len(engine.store.fetcher.reads) == 0


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 13, 40])
async def test_cancelling_anywhere_leaves_nothing_behind(store: RedisStore, opened: Any, steps: int) -> None:
    await fill(store, FOUR[: 2 * CHUNK + 1])
    engine = Engine(opened(store))
    task = asyncio.create_task(engine.find(FOUR))
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert len(engine.store.fetcher.reads) == 0
    assert len((await engine.find(FOUR)).chunks) == 2
    await until(lambda: engine.store.controller._queued == 0)  # a reader may still be at it


async def test_a_lock_taken_for_a_request_that_is_cancelled_is_freed(
    store: RedisStore, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "LOCK_WAIT_S", 5.0)  # freed in one try, which a busy machine may take longer for
    calls = RecordingStore(store)
    slow = gated(calls, "write")
    engine = Engine(opened(slow))
    task = asyncio.create_task(engine.find(FOUR))
    await until(lambda: slow.waiting)
    task.cancel()
    await asyncio.wait([task])
    slow.gate.set()
    await until(lambda: [call.result for call in calls.named("write")] == [True])
    lock = calls.named("write")[0].keys
    await until(lambda: store.count_prefix(lock, soon()) == 0)
    locks = engine.store.fetcher.locks
    assert locks is not None
    assert len(locks) == 0


@pytest.mark.parametrize("requests", [1, 8])
async def test_another_process_takes_chunks_as_they_are_stored(store: RedisStore, opened: Any, requests: int) -> None:
    """The first computes; all of the second, told that computing is slow, wait and have every chunk soon after."""
    calls = RecordingStore(store)
    first, second = Engine(opened(store)), Engine(opened(calls, fetch_timeout_s=30.0))
    assert (await first.find(FOUR)).chunks == []  # has the lock now
    waiting = [asyncio.create_task(second.find(FOUR)) for _ in range(requests)]
    # Each was refused the lock.
    await until(lambda: [call.result for call in calls.named("write")] == [False] * requests)
    for count in range(1, 5):
        assert not any(each.done() for each in waiting)
        first.compute(FOUR[: count * CHUNK], count - 1)
        assert await first.store.settle()
    assert [len((await each).chunks) for each in waiting] == [4] * requests
    assert second.store.stats().waits_s > 0
    locks = first.store.fetcher.locks
    assert locks is not None
    assert len(locks) == 0


async def test_waiting_for_another_process_ends_when_it_dies(store: RedisStore, opened: Any) -> None:
    first, second = Engine(opened(store)), Engine(opened(store, fetch_timeout_s=30.0))
    await first.find(FOUR)
    began = time.monotonic()
    found = await second.find(FOUR, seconds=lambda a, b: 0.01 * (b - a))  # a third of it is waited for
    assert found.chunks == []
    assert 0.05 < time.monotonic() - began < 15


async def test_nobody_waits_for_what_would_not_be_stored(store: RedisStore, opened: Any) -> None:
    first, second = (Engine(opened(store, admission="second")) for _ in range(2))
    await first.find(FOUR)
    await second.find(FOUR)
    assert second.store.stats().waits_s == 0.0


async def test_requests_of_one_process_do_not_wait_for_its_own_lock(store: RedisStore, opened: Any) -> None:
    engine = Engine(opened(store))
    await engine.find(FOUR)
    await engine.find(FOUR)
    assert engine.store.stats().waits_s == 0.0
