from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.prefix_store.link import SlowLink
from kvstore.fakes import FaultyStore, Plan
from kvstore.redis.nodes import parse_url
from kvstore.redis.redis_store import RedisStore
from tests.kvstore.prefixes import CHUNK, FOUR, Engine, fill, kv_of, soon
from tests.kvstore.servers import RedisProcess, redis_server
from turnout.types import Sharing

PLANS = {
    "unreachable": Plan(faults=("unreachable",)),
    "refused": Plan(faults=("refused",)),
    "probed, then unreachable": Plan(faults=(None, "unreachable")),
    "vanished": Plan(vanish=frozenset({1})),
    "truncated": Plan(truncate=frozenset({1})),
    "flipped": Plan(flip=frozenset({1})),
    "torn": Plan(torn=frozenset({1})),
    "torn at the start": Plan(torn=frozenset({0})),
    "swapped": Plan(swap=((1, 2),)),
    "dropped": Plan(drop=frozenset({1})),
}
AT_MOST = {"unreachable": 0, "refused": 0, "probed, then unreachable": 0, "torn at the start": 0}


@pytest.mark.parametrize("name", PLANS)
async def test_whatever_goes_wrong_is_a_miss(store: RedisStore, opened: Any, name: str) -> None:
    await fill(store, FOUR)
    faulty = FaultyStore(store, Plan())
    engine = Engine(opened(faulty))
    faulty.plan = PLANS[name]
    for _ in range(3):
        found = await engine.find(FOUR)  # which refuses what is wrong
        assert len(found.chunks) <= AT_MOST.get(name, 1)
    stats = engine.store.stats()
    if name not in ("vanished", "dropped", "torn"):
        assert sum(stats.faults.values()) >= 1
        assert set(stats.faults) <= {"unreachable", "refused", "length", "tag", "header"}
    faulty.plan = Plan()
    await engine.serve(FOUR)  # what was refused has been removed: it is computed, and stored anew
    assert len((await engine.find(FOUR)).chunks) == 4


async def test_a_value_of_a_future_version_is_a_miss_and_counted(store: RedisStore, opened: Any) -> None:
    engine = Engine(opened(store))
    await engine.serve(FOUR)
    encodings = engine.store.encodings
    link = engine.store.chain(Sharing.private("alice")).links(FOUR, 4)[2]
    key = encodings.keys(link, encodings.all[0])[0]
    value = bytearray(store.script("return redis.call('get', KEYS[1])", [key], [], soon()))
    value[4] += 1
    store.script("return redis.call('set', KEYS[1], ARGV[1])", [key], [bytes(value)], soon())
    assert len((await engine.find(FOUR)).chunks) == 2
    assert engine.store.stats().faults == {"version": 1}


async def test_a_value_of_a_wrong_size_is_not_even_received(store: RedisStore, opened: Any) -> None:
    engine = Engine(opened(store))
    await engine.serve(FOUR)
    encodings = engine.store.encodings
    link = engine.store.chain(Sharing.private("alice")).links(FOUR, 4)[1]
    key = encodings.keys(link, encodings.all[0])[0]
    store.script("return redis.call('set', KEYS[1], ARGV[1])", [key], [bytes(1 << 20)], soon())
    assert len((await engine.find(FOUR)).chunks) == 1
    assert engine.store.stats().faults == {"length": 1}


async def test_memory_serves_while_redis_is_away(store: RedisStore, opened: Any) -> None:
    faulty = FaultyStore(store, Plan())
    engine = Engine(opened(faulty, host_memory_bytes=1 << 20))
    await engine.serve(FOUR)
    faulty.plan = Plan(faults=("unreachable",))
    assert (await engine.find(FOUR)).tiers == ("memory",) * 4


async def test_a_slow_store_is_left_when_computing_is_faster(store: RedisStore, opened: Any) -> None:
    await fill(store, FOUR)
    faulty = FaultyStore(store, Plan())
    engine = Engine(opened(faulty, fetch_timeout_s=20.0))
    faulty.plan = Plan(late_s=30.0)
    began = time.monotonic()
    found = await engine.find(FOUR, seconds=lambda a, b: 1e-3 * (b - a))
    assert time.monotonic() - began < 10
    assert found.chunks == []


async def test_a_slow_link_nobody_has_used_yet_is_given_the_time_that_computing_takes(
    store: RedisStore, opened: Any
) -> None:
    await fill(store, FOUR)
    raw_bytes = kv_of(FOUR[:CHUNK]).nbytes
    link = SlowLink(store, rate=4 * raw_bytes / 0.8)  # more than the least time of a read
    engine = Engine(opened(link, fetch_timeout_s=30.0))
    found = await engine.find(FOUR, seconds=lambda a, b: 60.0 if b - a > 1 else 0.0)
    assert len(found.chunks) == 4


async def test_no_look_up_takes_longer_than_the_budget(store: RedisStore, opened: Any) -> None:
    await fill(store, FOUR)
    faulty = FaultyStore(store, Plan())
    engine = Engine(opened(faulty, fetch_timeout_s=0.3))
    faulty.plan = Plan(late_s=30.0)
    began = time.monotonic()
    assert (await engine.find(FOUR)).chunks == []
    assert 0.25 < time.monotonic() - began < 10


async def test_what_cannot_be_predicted_is_an_internal_fault_and_a_miss(store: RedisStore, opened: Any) -> None:
    await fill(store, FOUR)
    engine = Engine(opened(store))

    def broken(a: int, b: int) -> float:
        raise RuntimeError("no forecast")

    assert (await engine.find(FOUR, seconds=broken)).chunks == []
    assert engine.store.stats().faults == {"internal": 1}
    assert len(engine.store.fetcher.reads) == 0


async def test_fetching_that_does_not_pay_is_not_done(store: RedisStore, opened: Any) -> None:
    await fill(store, FOUR)
    engine = Engine(opened(store))
    await engine.find(FOUR)  # learns what the link is like
    assert (await engine.find(FOUR, seconds=lambda a, b: 1e-9 * (b - a))).chunks == []
    assert engine.store.stats().regret_s >= 0.0


def quick(redis: RedisProcess) -> RedisStore:
    """A connection whose breaker opens and closes fast."""
    return RedisStore(parse_url(redis.unix_url), breaker_errors=2, breaker_cooldown_s=0.05)


async def recovered(engine: Engine) -> bool:
    await engine.serve(FOUR)
    return len((await engine.find(FOUR)).chunks) == 4


async def test_a_server_that_dies_and_comes_back_empty_is_used_again(tmp_path: Path, opened: Any) -> None:
    with redis_server(tmp_path / "r") as redis:
        engine = Engine(opened(quick(redis)))
        assert await recovered(engine)
        redis.kill()
        for _ in range(4):
            assert (await engine.find(FOUR)).chunks == []
        assert engine.store.health() == "off"
        before = engine.store.stats().faults
        assert (await engine.find(FOUR)).chunks == []
        assert engine.store.stats().faults == before  # it was not asked
        redis.start()
        began = time.monotonic()
        while not await recovered(engine):
            assert time.monotonic() - began < 10.0
        assert engine.store.health() == "ok"


async def test_a_server_that_hangs_costs_little_and_is_used_again(tmp_path: Path, opened: Any) -> None:
    with redis_server(tmp_path / "r") as redis:
        engine = Engine(opened(quick(redis), fetch_timeout_s=0.5))
        assert await recovered(engine)
        redis.pause()
        try:
            began = time.monotonic()
            while engine.store.health() != "off":
                assert (await engine.find(FOUR)).chunks == []
                assert time.monotonic() - began < 10.0
            assert engine.store.stats().faults["late"] >= 2
        finally:
            redis.resume()
        began = time.monotonic()
        while not await recovered(engine):
            assert time.monotonic() - began < 10.0
