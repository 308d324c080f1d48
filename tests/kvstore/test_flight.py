from __future__ import annotations

import asyncio
import threading
import time
from itertools import pairwise

import torch

from kvstore.lookup.locks import ComputeLocks
from kvstore.lookup.single_flight import SingleFlight, Slot, Wake
from kvstore.redis.redis_store import RedisStore
from tests.kvstore.prefixes import soon, until

KV = torch.zeros(1)


def test_a_chunk_is_claimed_once_until_it_lands() -> None:
    flights = SingleFlight()
    (first, mine), (other, also) = flights.claim([b"a", b"b"], lossy=False)
    assert (mine, also) == (True, True)
    assert flights.claim([b"a"], lossy=False) == [(first, False)]
    first.settle("done", KV, "exact")
    flights.land(b"a", False, first)
    flights.land(b"b", False, other)
    assert len(flights) == 0
    assert flights.claim([b"a"], lossy=False)[0][1]


def test_landing_an_old_slot_leaves_the_new_one() -> None:
    flights = SingleFlight()
    old = flights.claim([b"a"], lossy=False)[0][0]
    flights.land(b"a", False, old)
    new = flights.claim([b"a"], lossy=False)[0][0]
    flights.land(b"a", False, old)
    assert flights.claim([b"a"], lossy=False) == [(new, False)]


def test_lossy_requests_take_part_in_exact_reads_and_never_the_other_way_round() -> None:
    flights = SingleFlight()
    exact = flights.claim([b"a"], lossy=False)[0][0]
    assert flights.claim([b"a"], lossy=True) == [(exact, False)]
    lossy = flights.claim([b"b"], lossy=True)[0][0]
    slot, mine = flights.claim([b"b"], lossy=False)[0]
    assert mine
    assert slot is not lossy


def test_a_slot_is_settled_once() -> None:
    slot = Slot()
    assert slot.settle("left")
    assert not slot.settle("done", KV, "exact")
    assert (slot.state, slot.kv) == ("left", None)


async def test_a_thread_wakes_whoever_waits() -> None:
    slot, wake = Slot(), Wake()
    slot.watch(wake)
    threading.Thread(target=slot.settle, args=("done", KV, "exact")).start()
    assert await wake.wait(5.0)
    assert slot.state == "done"
    assert not await wake.wait(0.0)
    slot.watch(wake)
    assert await wake.wait(5.0)


def test_waking_a_loop_that_has_ended_is_harmless() -> None:
    slot = Slot()

    async def watch() -> None:
        slot.watch(Wake())

    asyncio.run(watch())
    assert slot.settle("missing")


def test_one_process_has_the_lock(store: RedisStore) -> None:
    mine, theirs = ComputeLocks(store), ComputeLocks(store)
    assert mine.take([b"a" * 32, b"b" * 32], 5.0, soon())
    assert not theirs.take([b"a" * 32], 5.0, soon())
    assert mine.holds(b"a" * 32)
    assert not theirs.holds(b"a" * 32)
    mine.ended(b"a" * 32, soon())
    assert theirs.take([b"a" * 32], 5.0, soon())


def test_nobody_frees_the_lock_of_another(store: RedisStore) -> None:
    mine, theirs, third = ComputeLocks(store), ComputeLocks(store), ComputeLocks(store)
    assert mine.take([b"a" * 32], 0.1, soon())
    deadline = soon()
    while not theirs.take([b"a" * 32], 5.0, soon()):  # until it has expired
        assert time.monotonic() < deadline
    mine.ended(b"a" * 32, soon())
    assert not third.take([b"a" * 32], 5.0, soon())


def test_the_lock_walks_on_as_chunks_are_stored(store: RedisStore) -> None:
    mine, theirs = ComputeLocks(store), ComputeLocks(store)
    names = [bytes([i]) * 32 for i in range(3)]
    assert mine.take(names, 5.0, soon())
    for name, following in pairwise(names):
        mine.ahead(name, soon())
        mine.ended(name, soon())
        assert not theirs.take([following], 5.0, soon())
        assert mine.holds(following)
        assert not mine.holds(name)
    mine.ended(names[-1], soon())
    assert len(mine) == 0
    assert theirs.take([names[-1]], 5.0, soon())


async def test_a_lock_that_nobody_frees_expires(store: RedisStore) -> None:
    mine, theirs = ComputeLocks(store), ComputeLocks(store)
    assert mine.take([b"a" * 32], 0.0, soon())
    await until(lambda: theirs.take([b"a" * 32], 5.0, soon()))
    await until(lambda: not mine.holds(b"a" * 32))
    assert len(theirs) == 1
