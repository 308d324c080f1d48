"""Connections between ranks: what a frame that never ends does to who reads it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from engine.parallel.connections import Link, LinkClosedError
from engine.parallel.framing import Op, integers, pack

FRAME = pack(Op.HELLO, [integers(*range(100))])


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Link]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        mine, _ = server.accept()
    link = Link(mine, 1, "here", 0.2)
    yield theirs, link
    theirs.close()
    link.close()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("words", [FRAME[:5], FRAME[:-1]], ids=["half a head", "half a body"])
@pytest.mark.parametrize("reads", ["receive", "drain"])
def test_a_frame_that_does_not_go_on_ends_the_link(ends: tuple[socket.socket, Link], words: bytes, reads: str) -> None:
    theirs, link = ends
    theirs.sendall(words)
    with pytest.raises(LinkClosedError, match="part of a frame and then nothing"):
        link.receive() if reads == "receive" else link.drain()


@pytest.mark.timeout(30)
def test_between_frames_any_time_may_pass(ends: tuple[socket.socket, Link]) -> None:
    theirs, link = ends
    later = threading.Timer(0.6, theirs.sendall, [FRAME])  # three times what a frame that has begun may pause
    later.start()
    frame = link.receive()
    later.join()
    assert frame.op is Op.HELLO
    assert frame.arrays[0].tolist() == list(range(100))
