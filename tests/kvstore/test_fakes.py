"""The fakes do what they say: lives by the clock, faults as planned, calls written down, a proxy that spoils."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.base import ByteStore, StoreFault
from kvstore.fakes import Call, FaultyStore, MemoryByteStore, Plan, RecordingStore
from kvstore.faulty_server import Answers, FaultyServer, Spoil, answer_length, flipped
from tests.kvstore.servers import RedisProcess, redis_server, until

KEYS = [b"k%d" % i for i in range(6)]
VALUES = [bytes([65 + i]) * 8 for i in range(6)]


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def filled(**options: Any) -> MemoryByteStore:
    store = MemoryByteStore(**options)
    for key, value in zip(KEYS, VALUES, strict=True):
        store.put(key, value)
    return store


def read(store: ByteStore, keys: list[bytes] = KEYS) -> tuple[list[bytes], dict[int, bytes]]:
    """(Values that were complete, what lies in every place)."""
    rooms: dict[int, bytearray] = {}
    complete: list[int] = []

    def place(index: int, size: int) -> memoryview:
        rooms[index] = bytearray(b"\xaa" * size)
        return memoryview(rooms[index])

    def done(index: int) -> bool:
        complete.append(index)
        return True

    assert store.read(keys, place, done, 1000, soon()) == len(complete)
    return [bytes(rooms[i]) for i in complete], {i: bytes(room) for i, room in rooms.items()}


def test_lives_end_by_the_injected_clock() -> None:
    now = [0.0]
    store = MemoryByteStore(clock=lambda: now[0])
    store.write(b"a", [b"1"], 1000, soon())
    store.write(b"b", [b"2"], 2000, soon())
    now[0] = 0.999
    assert store.keys() == [b"a", b"b"]
    now[0] = 1.0
    assert store.keys() == [b"b"]
    assert store.write(b"a", [b"3"], 500, soon())
    assert store.touch([b"a", b"c", b"b"], None, soon()) == [True, False, True]
    now[0] = 1e9
    assert read(store, [b"a", b"b"])[0] == [b"3", b"2"]
    now[0] += 2
    assert store.keys() == []  # reading gave them a life again


def test_scripts_are_what_stands_for_them() -> None:
    store = filled(scripts={"size": lambda store, keys, args: len(store.get(keys[0]) or b"") + int(args[0])})
    assert store.script("size", KEYS[:1], [1], soon()) == 9
    with pytest.raises(StoreFault, match="no function"):
        store.script("other", [], [], soon())


def test_dropped_keys_make_gaps_for_probes_and_reads() -> None:
    store = FaultyStore(filled(), Plan(drop=frozenset({2, 3})))
    assert store.count_prefix(KEYS, soon()) == 2
    assert read(store)[0] == VALUES[:2]
    store.plan = Plan(vanish=frozenset({4}))
    assert store.count_prefix(KEYS, soon()) == 6
    assert read(store)[0] == VALUES[:4]


def test_values_are_spoilt_as_planned_and_no_others() -> None:
    plan = Plan(truncate=frozenset({1}), flip=frozenset({2}), swap=((3, 4),))
    spoilt = read(FaultyStore(filled(), plan))[0]
    assert spoilt == [VALUES[0], VALUES[1][:4], b"CCCCBCCC", VALUES[4], VALUES[3], VALUES[5]]
    assert read(FaultyStore(filled(), plan))[0] == spoilt
    assert read(FaultyStore(filled()))[0] == VALUES


def test_a_torn_value_half_fills_its_place_and_is_not_complete() -> None:
    values, rooms = read(FaultyStore(filled(), Plan(torn=frozenset({2}))))
    assert values == VALUES[:2]
    assert rooms[2] == b"CCCC\xaa\xaa\xaa\xaa"
    with pytest.raises(StoreFault):
        read(FaultyStore(filled(), Plan(torn=frozenset({0}))))


def test_faults_come_in_the_planned_order_and_lateness_ends_at_the_deadline() -> None:
    store = FaultyStore(filled(), Plan(faults=(None, "refused", "late", None)))
    kinds = []
    for _ in range(5):
        try:
            store.count_prefix(KEYS, soon())
            kinds.append("none")
        except StoreFault as fault:
            kinds.append(fault.kind)
    assert kinds == ["none", "refused", "late", "none", "none"]
    store.plan = Plan(late_s=30)
    began = time.monotonic()
    with pytest.raises(StoreFault) as caught:
        store.write(b"x", [b"y"], 1000, soon(0.05))
    assert caught.value.kind == "late"
    assert time.monotonic() - began < 10
    store.plan = Plan(late_s=0.01)
    assert store.count_prefix(KEYS, soon()) == 6


def test_calls_are_written_down_with_what_they_moved() -> None:
    store = RecordingStore(FaultyStore(filled(), Plan(faults=(None, None, "refused"))))
    store.count_prefix(KEYS, soon())
    read(store, KEYS[:2])
    with pytest.raises(StoreFault):
        store.write(b"new", [b"abc", memoryview(b"de")], 1000, soon())
    assert store.calls == [
        Call("count_prefix", tuple(KEYS), (), 6),
        Call("read", tuple(KEYS[:2]), (8, 8), 2),
        Call("write", (b"new",), (5,), None, "refused"),
    ]
    assert [call.name for call in store.named("read")] == ["read"]
    assert store.health() == "ok"
    store.close()
    assert store.health() == "off"


@pytest.mark.parametrize(
    "raw", [b"+OK\r\n", b"$-1\r\n", b"$3\r\na\r\n\r\n", b"*2\r\n:1\r\n*1\r\n$1\r\nx\r\n", b"*-1\r\n"]
)
def test_the_proxy_sees_where_an_answer_ends(raw: bytes) -> None:
    assert answer_length(raw + b":9\r\n") == len(raw)
    assert all(answer_length(raw[:cut]) is None for cut in range(len(raw)))


def test_answers_are_shifted_or_swapped_however_they_arrive() -> None:
    whole = b"$1\r\na\r\n$1\r\nb\r\n$1\r\nc\r\n"
    for cut in range(1, len(whole)):
        late = Answers()
        assert late.reorder(whole[:cut], False) + late.reorder(whole[cut:], False) == whole[:7] + whole[:14]
        assert late.held() == whole[14:]
        swapped = Answers()
        out = swapped.reorder(whole[:cut], True) + swapped.reorder(whole[cut:], True)
        assert out + swapped.reorder(b"", True) == whole[7:14] + whole[:7] + whole[14:]


def test_bits_turn_at_the_same_places_however_a_stream_is_cut() -> None:
    stream = bytes(1000)
    want = flipped(stream, 0, 64)
    assert sum(each != 0 for each in want) == 1000 // 64
    for cut in (1, 63, 64, 65, 500):
        assert flipped(stream[:cut], 0, 64) + flipped(stream[cut:], cut, 64) == want


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    with redis_server(tmp_path_factory.mktemp("r")) as process:
        yield process


def ask(connected: socket.socket, line: bytes, size: int) -> bytes:
    connected.sendall(line + b"\r\n")
    got = b""
    while len(got) < size:
        block = connected.recv(size - len(got))
        if not block:
            break
        got += block
    return got


def test_the_proxy_passes_on_and_changes_while_connections_are_open(server: RedisProcess) -> None:
    with FaultyServer(server.endpoint) as proxy:
        connected = socket.create_connection((proxy.endpoint.host, proxy.endpoint.port))
        connected.settimeout(5)
        assert ask(connected, b"ECHO hello", 11) == b"$5\r\nhello\r\n"
        proxy.spoil = Spoil("desync")
        assert ask(connected, b"ECHO first", 11) == b"$5\r\nfirst\r\n"
        assert ask(connected, b"ECHO other", 11) == b"$5\r\nfirst\r\n"
        proxy.spoil = Spoil("dribble", seconds=0.001)
        assert ask(connected, b"PING", 18) == b"$5\r\nother\r\n+PONG\r\n"
        proxy.spoil = Spoil("truncate", after_bytes=1)
        assert ask(connected, b"PING", 7) == b""
        connected.close()
        assert proxy.accepted == 1


def test_the_proxy_stalls_and_cuts(server: RedisProcess, tmp_path: Path) -> None:
    with FaultyServer(server.endpoint) as proxy:
        connected = socket.create_connection((proxy.endpoint.host, proxy.endpoint.port))
        connected.settimeout(0.2)
        proxy.spoil = Spoil("stall")

        # Whatever the pump was doing when the order came, by then it follows it.
        def pinged() -> bool:
            try:
                return bool(ask(connected, b"PING", 7))
            except TimeoutError:
                return False

        until(lambda: not pinged())
        connected.settimeout(5)
        proxy.spoil = Spoil("cut")
        assert connected.recv(10) == b""
        again = socket.create_connection((proxy.endpoint.host, proxy.endpoint.port))
        again.settimeout(5)
        assert again.recv(10) == b""
        for each in (connected, again):
            each.close()
