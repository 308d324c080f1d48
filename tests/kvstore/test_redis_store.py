"""The byte store: the same behaviour over every kind of address and in the fake."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore.base import ByteStore
from kvstore.fakes import MemoryByteStore
from kvstore.redis.nodes import TlsFiles, parse_url
from kvstore.redis.reading import MAX_AHEAD, WINDOW_BYTES, Sizes
from kvstore.redis.redis_store import RedisStore
from tests.kvstore.landing import LIFE_MS, Landing, fill, kind_of, read, soon
from tests.kvstore.servers import (
    RedisProcess,
    TlsFront,
    cluster_url,
    make_certificates,
    redis_cluster,
    redis_server,
    until,
)

KINDS = ["memory", "unix", "tcp", "tls", "cluster"]
PTTL = "return redis.call('PTTL', KEYS[1])"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    with redis_server(tmp_path_factory.mktemp("r")) as process:
        yield process


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisProcess]]:
    with redis_cluster(tmp_path_factory.mktemp("c")) as nodes:
        yield nodes


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ByteStore]:
    kind = request.param
    with ExitStack() as stack:
        if kind == "memory":
            store: ByteStore = MemoryByteStore()
        elif kind == "cluster":
            store = RedisStore(parse_url(cluster_url(request.getfixturevalue("cluster"))))
        else:
            server: RedisProcess = request.getfixturevalue("server")
            address = parse_url(server.unix_url if kind == "unix" else server.url)
            if kind == "tls":
                files = make_certificates(tmp_path)
                front = TlsFront(server.endpoint, files)
                stack.callback(front.close)
                address = parse_url(front.url, tls=TlsFiles(files.ca, files.client_cert, files.client_key))
            store = RedisStore(address)
        yield store
        store.close()


def test_values_of_all_sizes_come_back_in_order(store: ByteStore) -> None:
    sizes = [0, 1, 4095, 70_000, 1 << 20, 3_000_000, 17, 5 << 20, 2, 1 << 20, 1 << 20]
    keys = [b"to1:%s:%d" % (os.urandom(6).hex().encode(), i) for i in range(len(sizes))]
    values = [os.urandom(size) for size in sizes]
    for key, value in zip(keys, values, strict=True):
        cut = len(value) // 3
        assert store.write(key, [value[:cut], memoryview(value)[cut:]], LIFE_MS, soon())
    assert read(store, keys) == values
    assert read(store, keys[::-1]) == values[::-1]
    assert read(store, []) == []
    keys, values = fill(store, 300, 3000)
    assert read(store, keys) == values


def test_a_value_is_set_once(store: ByteStore) -> None:
    (key,), (value,) = fill(store, 1)
    assert not store.write(key, [b"another"], LIFE_MS, soon())
    assert read(store, [key]) == [value]


def test_a_probe_counts_up_to_the_first_gap(store: ByteStore) -> None:
    keys, _ = fill(store, 20)
    assert store.count_prefix(keys, soon()) == 20
    assert store.count_prefix([], soon()) == 0
    for gap, first in ((19, 19), (7, 7), (8, 7), (3, 3), (0, 0)):
        assert store.delete([keys[gap]], soon()) == 1
        assert store.count_prefix(keys, soon()) == first


def test_reading_stops_at_a_gap_and_leaves_later_places_alone(store: ByteStore) -> None:
    keys, values = fill(store, 12)
    store.delete([keys[5], keys[9]], soon())
    landing = Landing()
    assert store.read(keys, landing.place, landing.done, LIFE_MS, soon()) == 5
    assert landing.values() == values[:5]
    assert set(landing.rooms) == set(range(5))
    assert read(store, keys[:5]) == values[:5]  # and the connection serves on


def test_the_caller_may_stop_or_refuse_a_place(store: ByteStore) -> None:
    keys, values = fill(store, 10, 10_000)
    stopping = Landing(stop_after=3)
    assert store.read(keys, stopping.place, stopping.done, LIFE_MS, soon()) == 4
    assert stopping.values() == values[:4]
    refusing = Landing(unwanted=frozenset({6}))
    assert store.read(keys, refusing.place, refusing.done, LIFE_MS, soon()) == 6
    assert read(store, keys) == values


def test_lives_are_renewed_by_reading_and_by_touch(store: ByteStore) -> None:
    if isinstance(store, MemoryByteStore):
        store = MemoryByteStore(scripts={PTTL: _pttl})
    keys = [b"to1:ttl:%s" % os.urandom(6).hex().encode() for _ in range(3)]
    for key in keys:
        store.write(key, [b"x"], 5_000, soon())
    assert all(0 < store.script(PTTL, [key], [], soon()) <= 5_000 for key in keys)
    read(store, keys[:1])
    assert store.script(PTTL, keys[:1], [], soon()) > 50_000
    assert store.script(PTTL, keys[1:2], [], soon()) <= 5_000
    assert store.touch([b"to1:nobody", *keys], 100_000, soon()) == [False, True, True, True]
    assert all(store.script(PTTL, [key], [], soon()) > 90_000 for key in keys)
    for _ in range(2):
        assert store.touch([*keys, b"to1:nobody"], None, soon()) == [True, True, True, False]
    assert [store.script(PTTL, [key], [], soon()) for key in keys] == [-1, -1, -1]


def _pttl(store: MemoryByteStore, keys: object, args: object) -> int:
    (key,) = keys  # type: ignore[misc, attr-defined]
    end = store._values[key][1]
    return -1 if end is None else int((end - time.monotonic()) * 1000)


def test_a_value_ends_with_its_life(store: ByteStore) -> None:
    key = b"to1:brief:%s" % os.urandom(6).hex().encode()
    store.write(key, [b"x"], 30, soon())
    until(lambda: store.count_prefix([key], soon()) == 0, 5)
    assert read(store, [key]) == []


def test_delete_counts_what_was_there(store: ByteStore) -> None:
    keys, _ = fill(store, 9)
    assert store.delete([*keys, b"to1:nobody"], soon()) == 9
    assert store.delete(keys, soon()) == 0


def test_a_passed_deadline_is_late_and_harms_nothing(store: ByteStore) -> None:
    keys, values = fill(store, 2)
    for _ in range(5):
        assert kind_of(lambda: read(store, keys, time.monotonic() - 1)) == "late"
        assert kind_of(lambda: store.count_prefix(keys, time.monotonic() - 1)) == "late"
    assert store.health() == "ok"
    assert read(store, keys) == values


def test_after_close_every_call_is_a_fault(store: ByteStore) -> None:
    keys, _ = fill(store, 2)
    store.close()
    assert kind_of(lambda: read(store, keys)) == "unreachable"
    assert kind_of(lambda: store.count_prefix(keys, soon())) == "unreachable"
    assert store.health() == "off"


def test_many_threads_share_few_connections_and_get_their_own_values(store: ByteStore) -> None:
    keys, values = fill(store, 40, 20_000)
    wrong: list[object] = []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(15):
            picks = choose.sample(range(40), 6)
            got = read(store, [keys[i] for i in picks])
            if got != [values[i] for i in picks] or store.count_prefix(keys, soon()) != 40:
                wrong.append((seed, picks))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_error_in_the_callers_own_code_reaches_it_and_costs_only_the_connection(store: ByteStore) -> None:
    keys, values = fill(store, 6, 10_000)

    def fail(_: int) -> bool:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        store.read(keys, Landing().place, fail, LIFE_MS, soon())
    assert read(store, keys) == values
    assert store.health() == "ok"


def test_scripts_run_where_their_keys_are(server: RedisProcess, cluster: list[RedisProcess]) -> None:
    text = "redis.call('INCRBY', KEYS[1], ARGV[1]) return {redis.call('GET', KEYS[1]), KEYS[2], false, 7}"
    for url in (server.url, cluster_url(cluster)):
        store = RedisStore(parse_url(url))
        for tag in range(6):
            keys = [b"{%d}:count:%s" % (tag, os.urandom(4).hex().encode()), b"{%d}:x" % tag]
            assert store.script(text, keys, [5], soon()) == [b"5", keys[1], None, 7]
            assert store.script(text, keys, ["6"], soon()) == [b"11", keys[1], None, 7]
        assert kind_of(lambda store=store: store.script("return nonsense(", [b"k"], [], soon())) == "refused"  # type: ignore[misc]
        assert store.script("return 1", [], [], soon()) == 1
        store.close()


@pytest.mark.parametrize("size", [64 << 10, 1 << 20, 5 << 20])
def test_no_more_than_the_window_is_under_way(size: int) -> None:
    sizes = Sizes()
    assert sizes.ahead == 1  # one while nothing is known
    sizes.saw(size)
    assert sizes.ahead == max(WINDOW_BYTES // size, 1)
    sizes.saw(10)
    assert sizes.ahead <= max(WINDOW_BYTES // size * 1.05, 1)
    for _ in range(1000):
        sizes.saw(10)
    assert sizes.ahead == MAX_AHEAD  # a large value long ago does not hold small ones up
    tiny = Sizes()
    tiny.saw(1)
    assert tiny.ahead == MAX_AHEAD


def test_a_reader_asks_ahead_but_not_far(server: RedisProcess) -> None:
    """What the server has sent while the caller still holds the first of many values."""
    store = RedisStore(parse_url(server.url), connections=1)
    keys, values = fill(store, 40, 1 << 20)
    client = server.client()
    asked: list[int] = []

    def calls() -> int:
        return int(client.info("commandstats")["cmdstat_getex"]["calls"])

    read(store, keys[:1])
    before = calls()
    landing = Landing()

    def done(index: int) -> bool:
        asked.append(calls() - before - index - 1)
        return landing.done(index)

    assert store.read(keys, landing.place, done, LIFE_MS, soon(20)) == 40
    assert landing.values() == values
    assert max(asked) <= 4
    assert max(asked) >= 2
    client.close()
    store.close()
