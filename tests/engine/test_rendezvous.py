"""Ranks that meet: strangers neither join nor hold them up, and the meeting place is at one address only."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import Store, TCPStore

from engine.parallel.connections import Link
from engine.parallel.framing import Op, integers, pack
from engine.parallel.rendezvous import KEY, find_leader, meet
from engine.parallel.tcp_store import listen
from turnout.errors import TurnoutError

HOST, ELSEWHERE = "127.0.0.1", "127.0.0.2"
SOON_S = 60.0
MEETING_S = 2.0  # in which the meeting place is found and visited, on a busy machine too
HELD_UP_S = 20.0
HELLO = pack(Op.HELLO, [integers(1, 7)])

STRANGERS = {
    "silent": b"",
    "half a head": b"GET",
    "no operation": b"GET / HT",
    "half a hello": HELLO[:-1],
    "a huge hello": (1 << 31).to_bytes(4, "little") + HELLO[4:],
    "arrays that are not there": HELLO[:6] + b"\xff\xff" + HELLO[8:],
    "an unknown type": HELLO[:8] + b"\xff\xff" + HELLO[10:],
    "numbers in place of arrays": pack(Op.HELLO, [integers(1, 7)[:1]]),
    "another operation": pack(Op.GO, [integers(1, 7)]),
    "a rank that is not expected": pack(Op.HELLO, [integers(2, 7)]),
}


class Place:
    """A meeting of two that has begun, in a thread."""

    def __init__(self, thread: ThreadPoolExecutor, timeout_s: float) -> None:
        listener = listen(HOST)
        self.port: int = listener.getsockname()[1]
        self.begun = time.monotonic()
        self.leader: Future[tuple[Store, list[Link]]] = thread.submit(
            meet, 2, HOST, self.port, timeout_s, SOON_S, listener.detach()
        )
        told = TCPStore(HOST, self.port, None, False, timedelta(seconds=SOON_S)).get(KEY).decode()
        self.links = int(told.rpartition(":")[2])

    def visit(self, words: bytes) -> socket.socket:
        sock = socket.create_connection((HOST, self.links), SOON_S)
        sock.sendall(words)
        return sock


@pytest.fixture(autouse=True)
def long_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger who does hold up the meeting does so for longer than any pause of a busy machine."""
    monkeypatch.setattr("engine.parallel.rendezvous.HELLO_S", SOON_S)


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.mark.parametrize("words", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_does_not_hold_up_the_meeting(thread: ThreadPoolExecutor, words: bytes) -> None:
    place = Place(thread, MEETING_S)
    with place.visit(words), pytest.raises(TurnoutError, match="rank 1 of 2 did not join"):
        place.leader.result(SOON_S)
    assert time.monotonic() - place.begun < HELD_UP_S


def test_one_that_says_a_little_at_a_time_does_not_either(thread: ThreadPoolExecutor) -> None:
    place = Place(thread, MEETING_S)
    with place.visit(b"") as sock:
        for byte in HELLO[:-1]:
            if place.leader.done():
                break
            try:
                sock.sendall(bytes([byte]))
            except ConnectionError:
                break
            threading.Event().wait(0.2)  # the fault itself: always something, never all
        with pytest.raises(TurnoutError, match="rank 1 of 2 did not join"):
            place.leader.result(SOON_S)
    assert time.monotonic() - place.begun < HELD_UP_S


def test_a_rank_comes_in_after_strangers(thread: ThreadPoolExecutor) -> None:
    place = Place(thread, SOON_S)
    strangers = [place.visit(words) for name, words in STRANGERS.items() if name not in ("silent", "half a head")]
    for sock in strangers:
        with suppress(OSError):  # it has been turned away already
            sock.shutdown(socket.SHUT_WR)
    store, [mine] = find_leader(1, 2, HOST, place.port, SOON_S, SOON_S)
    theirs, [link] = place.leader.result(SOON_S)
    assert link.rank == 1
    theirs.set("a", "b")
    assert store.get("a") == b"b"
    mine.send(pack(Op.BEAT))
    assert link.receive(SOON_S).op is Op.BEAT
    for each in (mine, link):
        each.close()
    for sock in strangers:
        sock.close()


def test_the_meeting_place_listens_at_one_address_only(thread: ThreadPoolExecutor) -> None:
    place = Place(thread, MEETING_S)
    for port in (place.port, place.links):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((ELSEWHERE, port), SOON_S)
    with pytest.raises(TurnoutError):
        place.leader.result(SOON_S)


def test_a_port_that_is_held_is_nobody_elses() -> None:
    with listen(HOST) as held, pytest.raises(TurnoutError, match="rank 0 cannot host a group"):
        meet(2, HOST, held.getsockname()[1], 0.5, SOON_S)
