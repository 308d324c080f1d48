from __future__ import annotations

from threading import Thread

import torch

from kvstore.keys import Link
from kvstore.lookup.memory import EXACT, HostMemory
from turnout.types import Namespace

CHUNK_BYTES = 4 * 64


def chunk(value: float = 0.0) -> torch.Tensor:
    return torch.full((2, 4, 2, 1, 4), float(value))


def link(name: bytes, owner: str = "alice") -> Link:
    return Link(0, Namespace("private", owner), name)


def held(memory: HostMemory, names: list[bytes]) -> list[bytes]:
    return [name for name in names if memory.has(link(name))]


def test_what_is_put_is_found_until_its_space_is_needed() -> None:
    memory = HostMemory(2 * CHUNK_BYTES)
    for name in (b"a", b"b"):
        memory.put(link(name), chunk(ord(name)))
    found = memory.get([link(b"a"), link(b"x"), link(b"b")], [EXACT])
    assert [hit is not None and float(hit[0].max()) for hit in found] == [97, False, 98]
    memory.put(link(b"c"), chunk())
    assert memory.num_bytes == 2 * CHUNK_BYTES
    assert memory.evicted == 1
    assert len(memory) == 2


def test_the_least_recently_used_goes_first() -> None:
    memory = HostMemory(2 * CHUNK_BYTES)
    memory.put(link(b"a"), chunk())
    memory.put(link(b"b"), chunk())
    memory.get([link(b"a")], [EXACT])
    memory.put(link(b"c"), chunk())
    assert held(memory, [b"a", b"b", b"c"]) == [b"a", b"c"]


def test_who_holds_the_most_gives_up_its_own() -> None:
    memory = HostMemory(6 * CHUNK_BYTES)
    mine, theirs = [link(b"mine%d" % i) for i in range(3)], [link(b"theirs%d" % i, "bob") for i in range(20)]
    for each in (*mine, *theirs):
        memory.put(each, chunk())
    assert [memory.has(each) for each in mine] == [True] * 3
    assert [memory.has(each) for each in theirs] == [False] * 17 + [True] * 3
    memory.put(link(b"first", "cid"), chunk())  # a new namespace finds room
    assert memory.has(link(b"first", "cid"))
    assert sum(memory.has(each) for each in (*mine, *theirs)) == 5
    assert memory.num_bytes == 6 * CHUNK_BYTES


def test_looking_without_use_changes_nothing() -> None:
    memory = HostMemory(2 * CHUNK_BYTES)
    memory.put(link(b"a"), chunk())
    memory.put(link(b"b"), chunk())
    assert memory.has(link(b"a"))
    memory.put(link(b"c"), chunk())
    assert not memory.has(link(b"a"))


def test_a_chunk_outlives_its_continuations_when_they_are_used() -> None:
    memory = HostMemory(4 * CHUNK_BYTES)
    chain = [b"0", b"1", b"2", b"3"]
    for name in chain:
        memory.put(link(name), chunk())
    memory.get([*map(link, chain)], [EXACT])
    for count in (1, 2):
        memory.put(link(b"other%d" % count), chunk())
    assert held(memory, chain) == [b"0", b"1"]


def test_a_chunk_outlives_its_continuations_when_they_are_put() -> None:
    memory = HostMemory(4 * CHUNK_BYTES)
    chain = [b"0", b"1", b"2", b"3"]
    for index, name in enumerate(chain):
        memory.put(link(name), chunk(), before=[*map(link, chain[:index])])
    for count in (1, 2):
        memory.put(link(b"other%d" % count), chunk())
    assert held(memory, chain) == [b"0", b"1"]


def test_a_chain_longer_than_the_memory_keeps_its_head() -> None:
    memory = HostMemory(3 * CHUNK_BYTES)
    chain = [bytes([i]) for i in range(8)]
    for index, name in enumerate(chain):
        memory.put(link(name), chunk(), before=[*map(link, chain[:index])])
    assert held(memory, chain)[:2] == chain[:2]


def test_the_first_quality_that_is_there_is_taken() -> None:
    memory = HostMemory(4 * CHUNK_BYTES)
    memory.put(link(b"a"), chunk(1.0), "int8")
    assert memory.get([link(b"a")], [EXACT]) == [None]
    assert memory.get([link(b"a")], [EXACT, "int8"])[0][1] == "int8"  # type: ignore[index]
    memory.put(link(b"a"), chunk(2.0))
    kv, quality = memory.get([link(b"a")], [EXACT, "int8"])[0]  # type: ignore[misc]
    assert (float(kv.max()), quality) == (2.0, EXACT)


def test_putting_again_takes_no_more_space() -> None:
    memory = HostMemory(4 * CHUNK_BYTES)
    for value in range(5):
        memory.put(link(b"a"), chunk(value))
    assert memory.num_bytes == CHUNK_BYTES
    assert float(memory.get([link(b"a")], [EXACT])[0][0].max()) == 4.0  # type: ignore[index]


def test_nothing_larger_than_the_memory_is_held() -> None:
    for size in (0, CHUNK_BYTES - 1):
        memory = HostMemory(size)
        memory.put(link(b"a"), chunk())
        assert (len(memory), memory.num_bytes) == (0, 0)


def test_clear_gives_everything_back() -> None:
    memory = HostMemory(4 * CHUNK_BYTES)
    memory.put(link(b"a"), chunk())
    memory.clear()
    assert (len(memory), memory.num_bytes) == (0, 0)


def test_many_threads_never_lose_count() -> None:
    memory = HostMemory(5 * CHUNK_BYTES)

    def work(seed: int) -> None:
        for i in range(200):
            name = bytes([(i * seed) % 11])
            memory.put(link(name, "ab"[seed % 2]), chunk(), before=[link(bytes([(i + seed) % 11]))])
            memory.get([link(bytes([i % 11])), link(name)], [EXACT])

    threads = [Thread(target=work, args=(seed,)) for seed in (1, 2, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory.num_bytes == len(memory) * CHUNK_BYTES <= memory.max_bytes
