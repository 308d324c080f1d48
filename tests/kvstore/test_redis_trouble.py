"""A Redis that is slow, cut, spoilt, dead, paused or full: faults in time, nothing wrong after, and it heals."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.base import StoreFault
from kvstore.faulty_server import FaultyServer, Spoil
from kvstore.redis.nodes import parse_url
from kvstore.redis.redis_store import RedisStore
from tests.kvstore.landing import LIFE_MS, Landing, fill, kind_of, read, soon
from tests.kvstore.servers import RedisProcess, redis_server, until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    with redis_server(tmp_path_factory.mktemp("r")) as process:
        yield process


@pytest.fixture
def faulty(server: RedisProcess) -> Iterator[FaultyServer]:
    with FaultyServer(server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def through(faulty: FaultyServer) -> Iterator[RedisStore]:
    store = RedisStore(parse_url(faulty.url), breaker_errors=1000)
    yield store
    store.close()


@pytest.mark.parametrize("spoil", [Spoil("dribble", seconds=0.02), Spoil("stall")], ids=["dribble", "stall"])
def test_a_slow_server_is_left_at_the_deadline_and_used_again_after(
    faulty: FaultyServer, through: RedisStore, spoil: Spoil
) -> None:
    keys, values = fill(through, 4, 100_000)
    faulty.spoil = spoil
    for call in (
        lambda: read(through, keys, soon(0.2)),
        lambda: through.count_prefix(keys, soon(0.2)),
        lambda: through.script("return 'a long enough answer to dribble'", keys[:1], [], soon(0.2)),
    ):
        began = time.monotonic()
        assert kind_of(call) == "late"
        assert time.monotonic() - began < 10
    faulty.spoil = Spoil()
    assert read(through, keys) == values


def test_a_truncated_answer_ends_the_reading_at_what_was_whole(faulty: FaultyServer, through: RedisStore) -> None:
    keys, values = fill(through, 6, 10_000)
    faulty.spoil = Spoil("truncate", after_bytes=25_000)
    landing = Landing()
    # The connection used before has had some of its bytes already; a fresh one counts from 0.
    through.close()
    store = RedisStore(parse_url(faulty.url))
    assert store.read(keys, landing.place, landing.done, LIFE_MS, soon()) == 2
    assert landing.values() == values[:2]
    faulty.spoil = Spoil("truncate", after_bytes=100)
    assert kind_of(lambda: read(store, keys)) == "unreachable"
    faulty.spoil = Spoil()
    assert read(store, keys) == values
    store.close()


def test_a_cut_line_is_a_fault_and_then_healed(faulty: FaultyServer, through: RedisStore) -> None:
    keys, values = fill(through, 4, 1000)
    faulty.spoil = Spoil("cut")
    assert kind_of(lambda: read(through, keys)) == "unreachable"
    faulty.spoil = Spoil()
    assert read(through, keys) == values


def test_answers_of_other_commands_end_a_connection_once_they_are_noticed(
    faulty: FaultyServer, through: RedisStore
) -> None:
    """A desynchronised connection gives well-formed answers: the caller's seal notices, and says so by stopping."""
    keys, values = fill(through, 8, 1000)
    faulty.spoil = Spoil("desync")
    rooms = Landing()
    right: list[bool] = []

    def checked(index: int) -> bool:
        right.append(rooms.rooms[index] == values[index])
        return rooms.done(index) and right[-1]

    through.read(keys, rooms.place, checked, LIFE_MS, soon())
    assert right[-1] is False  # the fault is really planted
    # Though it was the last value, what comes next does not come over that connection.
    fresh, second, third = (read(through, [key]) for key in keys[:3])
    assert (fresh, second) == ([values[0]], [values[0]])  # shifted again, on a new connection
    assert through.read([keys[3]], rooms.place, lambda _: False, LIFE_MS, soon()) == 1
    assert read(through, [keys[4]]) == [values[4]]
    assert third == [values[1]]
    through.reset_connections()
    faulty.spoil = Spoil()
    assert read(through, keys) == values


def test_answers_of_another_kind_end_a_connection(faulty: FaultyServer, through: RedisStore) -> None:
    """Shifted by one between a probe, a write and a probe: no command takes the answer of one of another kind."""
    keys, values = fill(through, 3, 1000)
    faulty.spoil = Spoil("desync")
    kind_of(lambda: through.count_prefix(keys, soon()))
    kinds = [kind_of(lambda: through.write(os.urandom(8), [b"x"], LIFE_MS, soon())) for _ in range(2)]
    assert "broken" in kinds
    # A connection that holds back the answer of a write, which is none to a probe.
    other = RedisStore(parse_url(faulty.url))
    assert other.write(os.urandom(8), [b"x"], LIFE_MS, soon())
    assert kind_of(lambda: other.count_prefix(keys, soon())) == "broken"
    assert kind_of(lambda: other.count_prefix(keys[:1], soon())) == "none"
    other.close()
    faulty.spoil = Spoil()
    # The connection of the last write is behind by one as well: it is found out by its first reply.
    assert kind_of(lambda: read(through, keys)) in {"none", "broken"}
    assert read(through, keys) == values


def test_flipped_bits_reach_the_caller_or_are_faults_and_then_it_heals(
    faulty: FaultyServer, through: RedisStore
) -> None:
    keys, values = fill(through, 8, 4000)
    faulty.spoil = Spoil("flip", after_bytes=1500)
    assert kind_of(lambda: _assert_equal(read(through, keys, soon(0.5)), values)) != "none"
    faulty.spoil = Spoil()
    assert read(through, keys) == values


def _assert_equal(got: list[bytes], want: list[bytes]) -> None:
    if got != want:
        raise StoreFault("broken", "other values")


def test_a_connection_that_went_bad_while_idle_costs_no_error(tmp_path: Path) -> None:
    with redis_server(tmp_path) as own:
        store = RedisStore(parse_url(own.url), breaker_errors=1)
        fill(store, 1)
        own.kill()
        own.start()
        keys, values = fill(store, 2)
        assert read(store, keys) == values
        store.close()


def test_a_dead_server_opens_the_breaker_and_a_new_one_is_found_soon(tmp_path: Path) -> None:
    with redis_server(tmp_path) as own:
        store = RedisStore(parse_url(own.url), breaker_cooldown_s=0.2)
        keys, _ = fill(store, 2)
        own.kill()
        kinds = [kind_of(lambda: read(store, keys)) for _ in range(6)]
        assert kinds == ["unreachable"] * 3 + ["open"] * 3
        assert store.health() == "off"
        own.start()
        until(lambda: kind_of(lambda: store.count_prefix(keys, soon())) == "none", 10)
        assert store.health() == "ok"
        assert read(store, keys) == []  # it came back empty
        store.close()


def test_a_paused_server_is_left_alone_until_it_goes_on(tmp_path: Path) -> None:
    with redis_server(tmp_path) as own:
        store = RedisStore(parse_url(own.unix_url), breaker_cooldown_s=0.1)
        keys, values = fill(store, 3)
        own.pause()
        # A call that is late before it has begun is no error of the node's.
        until(lambda: kind_of(lambda: read(store, keys, soon(0.05))) == "late" and store.health() == "off", 30)
        waits = []
        end = soon(1.5)  # over several probes
        while time.monotonic() < end:
            began = time.monotonic()
            assert kind_of(lambda: read(store, keys, soon())) == "open"
            waits.append(time.monotonic() - began)
            time.sleep(0.002)
        # Probes take half a second; the longest wait may be the machine's.
        assert sorted(waits)[-2] < 0.25
        assert store.health() == "off"
        own.resume()
        until(lambda: store.health() != "off" and kind_of(lambda: read(store, keys)) == "none", 10)
        assert read(store, keys) == values
        assert store.health() == "ok"
        store.close()


def test_a_full_server_refuses_writes_and_still_reads(tmp_path: Path) -> None:
    with redis_server(tmp_path, "maxmemory 8mb", "maxmemory-policy noeviction") as own:
        store = RedisStore(parse_url(own.url))
        keys, values = fill(store, 2, 1 << 20)
        refused = 0
        for i in range(12):
            refused += kind_of(lambda i=i: store.write(b"to1:%d" % i, [bytes(1 << 20)], LIFE_MS, soon())) == "refused"  # type: ignore[misc]
        assert refused >= 5
        assert store.health() == "ok"
        with closing(own.client()) as client:
            client.config_set("maxmemory", "64mb")
        assert read(store, keys) == values
        store.close()


def test_close_wakes_a_caller_that_waits(faulty: FaultyServer, through: RedisStore) -> None:
    keys, _ = fill(through, 1)
    faulty.spoil = Spoil("stall")
    kinds: list[str] = []
    waiter = threading.Thread(target=lambda: kinds.append(kind_of(lambda: read(through, keys, soon(30)))))
    waiter.start()
    until(lambda: bool(_lent(through)), 5)
    through.close()
    waiter.join(5)
    assert kinds == ["unreachable"]


def _lent(store: RedisStore) -> int:
    return sum(pool.in_use for pool in store.routes.pools)


def test_all_connections_in_use_is_late_and_no_error_of_the_node(faulty: FaultyServer) -> None:
    store = RedisStore(parse_url(faulty.url), connections=1, breaker_errors=1)
    keys, values = fill(store, 1)
    faulty.spoil = Spoil("stall")
    holder = threading.Thread(target=lambda: kind_of(lambda: read(store, keys, soon(30))))
    holder.start()
    until(lambda: bool(_lent(store)), 5)
    assert kind_of(lambda: read(store, keys, soon(0.05))) == "late"
    assert store.health() == "ok"
    faulty.spoil = Spoil()
    holder.join()
    assert read(store, keys) == values
    store.close()


def test_a_forked_child_does_not_use_its_parents_connections(
    server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RedisStore(parse_url(server.url))
    keys, values = fill(store, 2)
    (pool,) = store.routes.pools
    (parents,) = pool.idle
    real = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: real + 1)
    assert read(store, keys) == values
    assert parents not in pool.idle
    store.close()
