from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvstore.base import StoreFault
from kvstore.encodings import Encodings
from kvstore.fakes import FaultyStore, MemoryByteStore, Plan, RecordingStore
from kvstore.keys import Keyring, Link
from kvstore.lookup.locks import ComputeLocks
from kvstore.lookup.memory import HostMemory
from kvstore.lookup.writer import RemoteTier, Writer
from kvstore.scripts import RECORD
from kvstore.tenants.quotas import Quotas
from kvstore.types import Counts, Offer
from tests.kvstore.prefixes import CHUNK, LAYOUT, ROOT, kv_of, tokens
from turnout.types import Sharing

KEYRING = Keyring(ROOT)


class Bench:
    """A writer over a store, and what was done with its offers."""

    def __init__(self, inner: Any = None, memory_bytes: int = 0, capacity: int = 4, codecs: tuple[str, ...] = ("raw",),
                 quota: int | None = None) -> None:  # fmt: skip
        self.bytes = MemoryByteStore(scripts={RECORD: lambda store, keys, args: [0, 0, []]})
        self.calls = RecordingStore(inner(self.bytes) if inner is not None else self.bytes)
        self.memory = HostMemory(memory_bytes)
        quotas = Quotas(self.calls, KEYRING, lambda _: quota, 60_000)
        self.locks = ComputeLocks(self.calls)
        remote = RemoteTier(self.calls, quotas, self.locks, 60_000, 5.0)
        self.writer = Writer(self.memory, remote, capacity, lambda tenant: tenant != "barred")
        self.encodings = Encodings(KEYRING, LAYOUT, codecs, CHUNK)
        self.counts = Counts()
        self.done: list[int] = []
        self.links = self.encodings.chain(Sharing.private("alice")).links(tokens(80), 10)

    def offer(self, index: int, read: Any = None, tenant: str = "alice") -> bool:
        link = self.links[index]

        def right() -> torch.Tensor:
            return kv_of(tokens(80)[: (index + 1) * CHUNK])

        return self.writer.offer(
            self.encodings, self.counts, Offer(link, tenant, read or right, lambda: self.done.append(index))
        )

    def stored(self, link: Link) -> list[bool]:
        return [
            self.bytes.get(key) is not None
            for encoding in self.encodings.all
            for key in self.encodings.keys(link, encoding)
        ]


@pytest.fixture
def benches() -> Iterator[list[Bench]]:
    made: list[Bench] = []
    yield made
    for bench in made:
        bench.writer.close(0.0)


def bench(benches: list[Bench], *args: Any, **kwargs: Any) -> Bench:
    benches.append(Bench(*args, **kwargs))
    return benches[-1]


def test_what_is_offered_is_stored_in_every_form_and_in_memory(benches: list[Bench]) -> None:
    it = bench(benches, memory_bytes=1 << 20, codecs=("int8", "raw"))
    assert it.offer(0)
    assert it.writer.settle(5.0)
    assert it.stored(it.links[0]) == [True, True]
    assert it.memory.has(it.links[0])
    assert it.done == [0]
    assert it.counts.writes == 2
    assert it.counts.bytes_written == sum(map(len, map(it.bytes.get, it.bytes.keys())))


def test_what_is_there_is_not_sent_again(benches: list[Bench]) -> None:
    it = bench(benches)
    for _ in range(3):
        assert it.offer(0)
        assert it.writer.settle(5.0)
    assert len(it.calls.named("write")) == 1
    assert it.done == [0, 0, 0]


def test_a_full_queue_drops_and_frees(benches: list[Bench]) -> None:
    it = bench(benches, capacity=2)
    gate, entered = threading.Event(), threading.Event()

    def read() -> torch.Tensor:
        entered.set()
        assert gate.wait(5.0)
        return kv_of(tokens(CHUNK))

    assert it.offer(0, read)
    assert entered.wait(5.0)
    assert [it.offer(index) for index in (1, 2, 3, 4)] == [True, True, False, False]
    assert it.done == [3, 4]
    assert it.counts.dropped == {"queue": 2}
    gate.set()
    assert it.writer.settle(5.0)
    assert sorted(it.done) == [0, 1, 2, 3, 4]


def test_offering_never_waits_for_the_store(benches: list[Bench]) -> None:
    gate = threading.Event()

    class Stuck(MemoryByteStore):
        def count_prefix(self, keys: Any, deadline: float) -> int:
            assert gate.wait(30)
            return 0

    it = bench(benches, lambda _: Stuck())
    began = time.monotonic()
    assert it.offer(0)
    assert it.offer(1)
    assert time.monotonic() - began < 20
    deadline = time.monotonic() + 20
    while it.done != [0] and time.monotonic() < deadline:  # read and freed while Redis is stuck
        time.sleep(0.001)
    assert it.done == [0]
    gate.set()
    assert it.writer.settle(5.0)


@pytest.mark.parametrize("kind", ["unreachable", "late", "refused", "open"])
def test_a_fault_is_counted_and_the_memory_has_the_chunk(benches: list[Bench], kind: Any) -> None:
    it = bench(benches, lambda inner: FaultyStore(inner, Plan(faults=(kind,))), memory_bytes=1 << 20)
    assert it.offer(0)
    assert it.writer.settle(5.0)
    assert it.counts.faults == {kind: 1}
    assert sum(it.counts.dropped.values()) == 1
    assert it.memory.has(it.links[0])
    assert it.done == [0]


def test_reading_that_fails_is_counted_and_the_writer_goes_on(benches: list[Bench]) -> None:
    it = bench(benches)

    def broken() -> torch.Tensor:
        raise RuntimeError("the device is gone")

    assert it.offer(0, broken)
    assert it.offer(1)
    assert it.writer.settle(5.0)
    assert it.counts.faults == {"internal": 1}
    assert it.done == [0, 1]
    assert it.stored(it.links[1]) == [True]


def test_a_codec_that_refuses_does_not_keep_others_from_storing(benches: list[Bench]) -> None:
    it = bench(benches, codecs=("raw", "int8"))
    assert it.offer(0, lambda: torch.full_like(kv_of(tokens(CHUNK)), float("nan")))
    assert it.writer.settle(5.0)
    assert it.stored(it.links[0]) == [True, False]
    assert it.counts.faults == {"codec": 1}


def test_who_may_not_write_stores_nothing(benches: list[Bench]) -> None:
    it = bench(benches, memory_bytes=1 << 20)
    assert it.offer(0, tenant="barred")
    assert it.writer.settle(5.0)
    assert it.counts.dropped == {"quota": 1}
    assert (it.bytes.keys(), len(it.memory), it.done) == ([], 0, [0])
    small = bench(benches, quota=100)
    assert small.offer(0)
    assert small.writer.settle(5.0)
    assert small.counts.dropped == {"quota": 1}
    assert small.bytes.keys() == []


def test_a_store_whose_index_fails_has_the_values(benches: list[Bench]) -> None:
    it = bench(benches)
    it.bytes._scripts.clear()
    assert it.offer(0)
    assert it.writer.settle(5.0)
    assert it.stored(it.links[0]) == [True]
    assert it.counts.faults == {"refused": 1}
    assert not it.counts.dropped


def test_deeper_chunks_expire_first(benches: list[Bench]) -> None:
    it = bench(benches)
    for index in (0, 5):
        assert it.offer(index)
    assert it.writer.settle(5.0)
    ends = {key: end for key, (_, end) in it.bytes._values.items()}
    first, deep = (it.encodings.keys(it.links[index], it.encodings.all[0])[0] for index in (0, 5))
    assert (ends[deep] or 0) < (ends[first] or 0) + 5.0
    assert 0.02 < 60.0 - (ends[deep] or 0) + time.monotonic() < 10.0


def test_closing_writes_what_it_can_and_frees_everything() -> None:
    it = Bench(capacity=10)
    for index in range(4):
        assert it.offer(index)
    it.writer.close(5.0)
    assert sorted(it.done) == [0, 1, 2, 3]
    assert it.counts.writes == 4
    assert not it.offer(5)
    assert it.done[-1] == 5
    assert it.counts.dropped == {"closed": 1}


def test_closing_does_not_wait_for_a_store_that_is_stuck() -> None:
    gate, entered = threading.Event(), threading.Event()

    class Stuck(MemoryByteStore):
        def count_prefix(self, keys: Any, deadline: float) -> int:
            entered.set()
            gate.wait(30)
            raise StoreFault("late", "stuck")

    it = Bench(lambda _: Stuck(), capacity=10)
    for index in range(4):
        assert it.offer(index)
    assert entered.wait(10)
    began = time.monotonic()
    it.writer.close(0.05)
    assert time.monotonic() - began < 20
    assert sorted(it.done) == [0, 1, 2, 3]
    assert it.counts.dropped["closed"] == 3
    gate.set()
    assert it.writer.settle(5.0)


def test_the_lock_on_a_stored_chunk_moves_on_and_that_on_a_dropped_one_is_freed(benches: list[Bench]) -> None:
    free: list[bytes] = []

    def free_script(store: MemoryByteStore, keys: Any, args: Any) -> int:
        free.append(keys[0])
        return store.delete(keys, time.monotonic() + 1.0)

    from kvstore.scripts import FREE

    it = bench(benches)
    it.bytes._scripts[FREE] = free_script
    digests = [link.digest for link in it.links[:2]]
    assert it.locks.take(digests, 5.0, time.monotonic() + 5.0)
    assert it.offer(0)
    assert it.writer.settle(5.0)
    assert it.locks.holds(digests[1])
    assert len(free) == 1
    assert it.offer(1, tenant="barred")
    assert it.writer.settle(5.0)
    assert len(it.locks) == 0
    assert len(free) == 2
