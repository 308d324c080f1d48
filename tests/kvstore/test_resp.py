"""The protocol by hand: every split of the bytes, total deadlines, and answers that no server gives."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.base import StoreFault
from kvstore.redis.resp import BUFFER_BYTES, Connection, ErrorReply, command, per_key, set_once
from kvstore.redis.streams import PlainStream

ANSWERS = [
    (b"+OK\r\n", b"OK"),
    (b":0\r\n", 0),
    (b":1\r\n", 1),
    (b":-42\r\n", -42),
    (b"$-1\r\n", None),
    (b"$0\r\n\r\n", b""),
    (b"$6\r\nab\r\ncd\r\n", b"ab\r\ncd"),
    (b"*-1\r\n", None),
    (b"*0\r\n", []),
    (b"*3\r\n:7\r\n*2\r\n$1\r\nx\r\n$-1\r\n+y\r\n", [7, [b"x", None], b"y"]),
    (b"-NOPERM no such right\r\n", ErrorReply("NOPERM no such right")),
]
SPOILT = [
    b"hello\r\n",
    b"\r\n",
    b":\r\n",
    b":1x\r\n",
    b":--1\r\n",
    b"$abc\r\n",
    b"$-2\r\n",
    b"$99999999999999\r\n",
    b"$3\r\nabcd\r\n",
    b"*1\r\n$1\r\nabc",
    b"*99999999\r\n",
    b"*1\r\n" * 20 + b":1\r\n",
    b"+" + b"x" * (BUFFER_BYTES + 1),
]


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


class Peer:
    """Two ends: ours, and one for the test to play the server on."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.connection = Connection(PlainStream(ours))

    def answers(self, replies: int, *blocks: bytes) -> Connection:
        """Send blocks each on its own, as answers to that number of commands."""
        self.connection.pending += replies
        self.theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)

        def send() -> None:
            with contextlib.suppress(OSError):
                for block in blocks:
                    self.theirs.sendall(block)

        threading.Thread(target=send, daemon=True).start()
        return self.connection

    def close(self) -> None:
        self.connection.close()
        self.theirs.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


def test_commands_on_the_wire() -> None:
    assert command("SET", b"k\r\n", 5) == b"*3\r\n$3\r\nSET\r\n$3\r\nk\r\n\r\n$1\r\n5\r\n"
    assert per_key((b"GETEX",), [b"a", b"bc"], (b"PX", 10)) == [
        command("GETEX", "a", "PX", 10),
        command("GETEX", "bc", "PX", 10),
    ]
    assert per_key((b"EXISTS",), [b"a"]) == [command("EXISTS", "a")]
    parts = set_once(b"key", [b"head", memoryview(b"body")], 1000)
    assert b"".join(parts) == command("SET", "key", "headbody", "PX", 1000, "NX")


@pytest.mark.parametrize(("raw", "means"), ANSWERS)
def test_an_answer_split_anywhere_means_the_same(peer: Peer, raw: bytes, means: object) -> None:
    for cut in range(1, len(raw) + 1):
        connection = peer.answers(2, raw[:cut], raw[cut:], raw)
        assert connection.replies(2, soon()) == [means, means]
        assert connection.reusable


def test_many_answers_in_one_block_come_apart(peer: Peer) -> None:
    pattern = [1, 1, 0, 1, 1, 1, 0, 0, 1] * 2000
    connection = peer.answers(len(pattern), b"".join(b":%d\r\n" % each for each in pattern))
    assert connection.replies(len(pattern), soon()) == pattern
    assert connection.reusable


@pytest.mark.parametrize("size", [0, 1, 2, BUFFER_BYTES - 9, BUFFER_BYTES - 1, BUFFER_BYTES, 70_001, 1 << 20])
def test_values_arrive_in_the_callers_memory(peer: Peer, size: int) -> None:
    value = os.urandom(size)
    raw = b"$%d\r\n%b\r\n" % (size, value)
    room = bytearray(b"\xaa" * (size + 2))
    connection = peer.answers(3, raw, raw + raw[:5], raw[5:])
    for _ in range(3):
        room[:] = b"\xaa" * len(room)
        assert connection.bulk_size(soon()) == size
        connection.bulk_into(memoryview(room)[1:-1], soon())
        assert bytes(room) == b"\xaa" + value + b"\xaa"
    assert connection.reusable


@pytest.mark.parametrize("raw", SPOILT, ids=lambda raw: repr(raw[:12]))
def test_what_no_server_sends_is_a_fault_and_ends_the_connection(peer: Peer, raw: bytes) -> None:
    connection = peer.answers(1, raw)
    with pytest.raises(StoreFault) as caught:
        connection.reply(soon())
    assert caught.value.kind == "broken"
    assert not connection.reusable


def test_a_reply_that_is_no_value_is_a_fault_where_a_value_was_asked_for(peer: Peer) -> None:
    with pytest.raises(StoreFault, match="no value"):
        peer.answers(1, b":1\r\n").bulk_size(soon())


def test_missing_and_refused_values_are_told_apart(peer: Peer) -> None:
    connection = peer.answers(2, b"$-1\r\n-MOVED 5 h:1\r\n")
    assert connection.bulk_size(soon()) is None
    assert connection.bulk_size(soon()) == ErrorReply("MOVED 5 h:1")
    assert connection.reusable


def test_a_connection_with_answers_under_way_or_unasked_is_not_reused(peer: Peer) -> None:
    connection = peer.answers(2, b":5\r\n")
    assert connection.reply(soon()) == 5
    assert not connection.reusable  # one answer is still to come
    other = Peer()
    assert other.connection.quiet()
    other.theirs.sendall(b":1\r\n")
    assert not other.connection.quiet()  # no command asked for that
    other.close()
    gone = Peer()
    gone.theirs.close()
    assert not gone.connection.quiet()
    gone.close()


@pytest.mark.parametrize("whole", [True, False], ids=["value", "line"])
def test_a_dribbling_server_is_left_at_the_deadline(peer: Peer, whole: bool) -> None:
    """Bytes keep coming, each well within a timeout that counts for one receive."""
    ended = threading.Event()

    def dribble() -> None:
        with contextlib.suppress(OSError):
            peer.theirs.sendall(b"$1000000\r\n" if whole else b"+")
            while not ended.wait(0.01):
                peer.theirs.sendall(b"x")

    feeder = threading.Thread(target=dribble)
    feeder.start()
    peer.connection.pending += 1
    began = time.monotonic()
    with pytest.raises(StoreFault) as caught:
        peer.connection.reply(began + 0.2)
    took = time.monotonic() - began
    ended.set()
    feeder.join()
    assert caught.value.kind == "late"
    assert 0.19 < took < 10
    assert not peer.connection.reusable


def test_a_silent_server_and_a_passed_deadline_are_late(peer: Peer) -> None:
    for seconds in (0.05, -1.0):
        fresh = Peer()
        assert fresh.answers(1, b":7\r\n").reply(soon(30)) == 7  # whatever the call before was allowed
        began = time.monotonic()
        with pytest.raises(StoreFault) as caught:
            fresh.connection.reply(began + seconds)
        assert caught.value.kind == "late"
        assert time.monotonic() - began < 10
        fresh.close()


@pytest.mark.parametrize("family", ["unix", "tcp"])
def test_a_server_that_does_not_read_is_left_at_the_deadline(family: str, tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX) if family == "unix" else socket.socket()
    listener.bind(str(tmp_path / "s") if family == "unix" else ("127.0.0.1", 0))
    listener.listen()
    ours = socket.socket(listener.family)
    ours.connect(listener.getsockname())
    theirs, _ = listener.accept()
    connection = Connection(PlainStream(ours))
    began = time.monotonic()
    with pytest.raises(StoreFault) as caught:
        connection.send([bytes(64 << 20)], 1, began + 0.2)
    assert caught.value.kind == "late"
    assert 0.19 < time.monotonic() - began < 10
    for each in (connection, theirs, listener):
        each.close()


def test_parts_arrive_in_order_whatever_the_socket_takes_at_once(peer: Peer) -> None:
    parts = [os.urandom(size) for size in (0, 1, 300_000, 7, 2_000_000, 0, 5)] + [b"z"] * 1500
    got = bytearray()
    want = b"".join(parts)

    def read() -> None:
        while len(got) < len(want):
            got.extend(peer.theirs.recv(100_000))

    reader = threading.Thread(target=read)
    reader.start()
    peer.connection.send([memoryview(part) for part in parts], 1, soon())
    reader.join()
    assert bytes(got) == want


def test_a_cut_in_the_middle_of_a_value_is_a_fault(peer: Peer) -> None:
    connection = peer.answers(1, b"$10\r\nabc")
    assert connection.bulk_size(soon()) == 10
    room = memoryview(bytearray(10))
    peer.theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(StoreFault) as caught:
        connection.bulk_into(room, soon())
    assert caught.value.kind == "unreachable"


def test_shut_wakes_who_waits(peer: Peer) -> None:
    faults: list[str] = []

    def wait() -> None:
        try:
            peer.connection.reply(soon(30))
        except StoreFault as fault:
            faults.append(fault.kind)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while waiter.is_alive():
        peer.connection.shut()
        waiter.join(0.01)
    assert faults == ["unreachable"]
