"""How ranks find each other: over a store that rank 0 hosts, with an error that names who did not come."""

from __future__ import annotations

import os
import socket
import struct
import time
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from engine.parallel.connections import Link, LinkClosedError
from engine.parallel.framing import Op, integers, pack, pack_text, unpack_text
from engine.parallel.tcp_store import host_store, listen
from turnout.addresses import host_port
from turnout.errors import Code, TurnoutError

KEY = "links"
HELLO_S = 5.0  # time for a connected rank to say who it is
HELLO_BYTES = 4096  # of what a stranger says; more is not read
SHORTEST_S = 0.001
GRACE_S = 5.0  # time beyond the timeout in which the leader says who is missing


def meet(
    world: int, address: str, port: int, timeout_s: float, step_timeout_s: float, listen_fd: int | None = None
) -> tuple[Store, list[Link]]:
    """The leader's part: host the meeting and wait for every other rank.

    Args:
        world: ranks, this one included.
        address: of this machine, as the others reach it.
        port: a free one.
        timeout_s: longest time to wait.
        step_timeout_s: longest time a rank may take nothing of what it is sent.
        listen_fd: of a socket that holds the port, see `engine.parallel.tcp_store.listen`; taken over. None: none does.

    Raises:
        TurnoutError: UNAVAILABLE: ranks did not come, which are named, or the port is taken.
    """
    deadline = time.monotonic() + timeout_s
    try:
        held = listen(address, port) if listen_fd is None else socket.socket(fileno=listen_fd)
        store = host_store(held, timeout_s)
        listener = listen(address)
    except (OSError, RuntimeError) as error:
        raise _unavailable(f"rank 0 cannot host a group at {host_port(address, port)}: {error}") from error
    links: dict[int, Link] = {}
    with listener:
        store.set(KEY, f"{address}:{listener.getsockname()[1]}")
        while len(links) < world - 1 and (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            with suppress(TimeoutError):
                sock, peer = listener.accept()
                left = max(deadline - time.monotonic(), SHORTEST_S)
                _welcome(Link(sock, -1, peer[0], step_timeout_s), world, links, min(left, HELLO_S))
    missing = sorted(set(range(1, world)) - links.keys())
    if missing:
        named = ", ".join(f"rank {rank}" for rank in missing)
        message = (
            f"{named} of {world} did not join the group at {host_port(address, port)} within {timeout_s:g} s:"
            " look at what these processes log, check that their nodes reach this one on all ports,"
            " or raise placement.join_timeout_s"
        )
        _send_all(links, pack(Op.REFUSED, [pack_text(message)]))
        for link in links.values():
            link.close()
        raise _unavailable(message)
    _send_all(links, pack(Op.WELCOME))
    return store, [links[rank] for rank in sorted(links)]


def _welcome(link: Link, world: int, links: dict[int, Link], timeout_s: float) -> None:
    """Enter a rank that identifies itself in time; other connections are closed."""
    try:
        hello = link.receive_first(timeout_s, HELLO_BYTES)
        rank, pid = map(int, hello.arrays[0].tolist())
        known = hello.op is Op.HELLO and 1 <= rank < world and rank not in links
    except (LinkClosedError, struct.error, ValueError, TypeError, IndexError):
        known = False
    if not known:
        link.close()
        return
    link.rank, link.place = rank, f"{link.place}, pid {pid}"
    links[rank] = link


def _send_all(links: dict[int, Link], frame: bytes) -> None:
    for link in links.values():
        with suppress(LinkClosedError):
            link.send(frame)


def find_leader(
    rank: int, world: int, address: str, port: int, timeout_s: float, step_timeout_s: float
) -> tuple[Store, list[Link]]:
    """Another rank's part; see `meet`.

    Raises:
        TurnoutError: UNAVAILABLE: rank 0 or others did not come.
    """
    deadline = time.monotonic() + timeout_s
    where = host_port(address, port)
    absent = f"rank 0 does not answer at {where}; rank {rank} of {world} waited {timeout_s:g} s for it"
    try:
        store = TCPStore(address, port, world, False, timedelta(seconds=timeout_s))
        host, _, number = store.get(KEY).decode().rpartition(":")
        sock = socket.create_connection((host, int(number)), timeout=max(deadline - time.monotonic(), 1.0))
    except (OSError, RuntimeError) as error:
        raise _unavailable(absent) from error
    link = Link(sock, 0, where, step_timeout_s)
    try:
        link.send(pack(Op.HELLO, [integers(rank, os.getpid())]))
        answer = link.receive(deadline - time.monotonic() + GRACE_S)
    except (TimeoutError, LinkClosedError) as error:
        link.close()
        raise _unavailable(absent) from error
    if answer.op is not Op.WELCOME:
        link.close()
        raise _unavailable(unpack_text(answer.arrays[0]) if answer.arrays else absent)
    return store, [link]


def _unavailable(message: str) -> TurnoutError:
    return TurnoutError(Code.UNAVAILABLE, message)
