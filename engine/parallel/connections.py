"""Connections between the leader and each other rank: frames in order, signs of life, and who is gone."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.parallel.framing import HEAD, Array, Op, pack, unpack, unpack_head, unpack_text

BEAT_S = 1.0  # between two signs of life
SHORTEST_S = 0.001
SILENT_BEATS = 3  # a peer that misses this number of them counts as lost


class LinkClosedError(Exception):
    """The other end is closed: its process has ended, or has given up."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What came."""

    op: Op
    arrays: list[Array]


class Link:
    """One connection. Frames may be sent from several threads, and received from one at a time.

    Args:
        sock: connected; taken over.
        rank: who is at the other end.
        place: where that is, for messages.
        timeout_s: longest time to wait while the other end takes nothing, or gives nothing of a frame it has begun.
    """

    def __init__(self, sock: socket.socket, rank: int, place: str, timeout_s: float) -> None:
        self.rank = rank
        self.place = place
        self._sock = sock
        self._sending = threading.Lock()
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, _timeval(timeout_s))
        _keep_alive(sock)
        self._kept: deque[Frame] = deque()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.place})"

    @property
    def address(self) -> str:
        """This machine's, as the other end reaches it."""
        address: str = self._sock.getsockname()[0]
        return address

    def send(self, frame: bytes) -> None:
        """Send a frame of `pack`.

        Raises:
            LinkClosedError: the other end is closed.
        """
        try:
            with self._sending:
                self._sock.sendall(frame)
        except OSError as error:
            raise LinkClosedError(f"{self}: {error}") from error

    def receive(self, timeout_s: float | None = None) -> Frame:
        """The next frame.

        Args:
            timeout_s: longest time to wait for it; None: any.

        Raises:
            TimeoutError: nothing came.
            LinkClosedError: nothing will come, or half a frame came and nothing more.
        """
        if self._kept:
            return self._kept.popleft()
        if not self._poll.poll(None if timeout_s is None else max(timeout_s, 0.0) * 1000):
            raise TimeoutError
        return self._next()

    def receive_first(self, timeout_s: float, most_bytes: int) -> Frame:
        """Receive the first frame of a new connection, all of it in time, and of a bounded size.

        Args:
            timeout_s: longest time for the whole frame.
            most_bytes: of it, without its head.

        Raises:
            LinkClosedError: it did not come in time, or will not come.
            ValueError: it is larger, or no frame; struct.error, TypeError and IndexError: its content is none.
        """
        deadline = time.monotonic() + timeout_s
        try:
            op, count, size = unpack_head(bytes(self._read(HEAD, deadline)))
            if size > most_bytes:
                raise ValueError(f"{self}: a first frame of {size} bytes")
            return Frame(op, unpack(self._read(size, deadline), count) if size else [])
        finally:
            self._sock.settimeout(None)

    def keep(self, frame: Frame) -> None:
        """Give back a frame that is for a later `receive`."""
        self._kept.append(frame)

    def drain(self) -> list[Frame]:
        """What was given back, and what has come since.

        Raises:
            LinkClosedError: nothing more will.
        """
        frames = list(self._kept)
        self._kept.clear()
        while self._poll.poll(0):
            try:
                frames.append(self._next())
            except LinkClosedError:
                if not frames:  # else the next call says so
                    raise
                break
        return frames

    def _next(self) -> Frame:
        op, count, size = unpack_head(bytes(self._read(HEAD)))
        return Frame(op, unpack(self._read(size), count) if size else [])

    def _read(self, size: int, deadline: float | None = None) -> npt.NDArray[np.uint8]:
        body = np.empty(size, dtype=np.uint8)
        rest = body.data
        try:
            while rest:
                if deadline is not None:
                    self._sock.settimeout(max(deadline - time.monotonic(), SHORTEST_S))
                count = self._sock.recv_into(rest)
                if not count:
                    raise LinkClosedError(f"{self}: the connection is closed")
                rest = rest[count:]
        except BlockingIOError as error:
            raise LinkClosedError(f"{self}: it sent part of a frame and then nothing") from error
        except OSError as error:
            raise LinkClosedError(f"{self}: {error}") from error
        return body

    def close(self) -> None:
        """Close the connection; a receiver that waits at the other end is woken with an error."""
        with suppress(OSError):  # it is not connected any more
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class Beats:
    """Heartbeat sender, which runs until it is stopped or the other end is closed.

    Args:
        link: to the leader.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        beat = pack(Op.BEAT)
        while not self._stopped.wait(BEAT_S):
            try:
                self._link.send(beat)
            except LinkClosedError:
                return

    def stop(self) -> None:
        """Send no more."""
        self._stopped.set()
        self._thread.join()


def gone(links: list[Link]) -> list[str]:
    """Ranks that have ended, or give no sign of life within a few beats: what to call each, and why.

    Returns at once where a rank has said that it ends, or its connection is closed.
    """
    lost: dict[int, str] = {}
    for link in links:  # signs of life that came before now say nothing
        _hear(link, None, lost)
    silent = {link.rank: link for link in links}
    deadline = time.monotonic() + SILENT_BEATS * BEAT_S
    while silent and not lost and time.monotonic() < deadline:
        for rank, link in list(silent.items()):
            if _hear(link, BEAT_S / 10, lost):
                del silent[rank]
    if not lost:
        lost = {rank: f"{link} gives no sign of life" for rank, link in silent.items()}
    return list(lost.values())


def _hear(link: Link, timeout_s: float | None, lost: dict[int, str]) -> bool:
    """Take what a rank has sent, or what it sends next; whether anything came. Enters it where it has ended."""
    try:
        frames = link.drain() if timeout_s is None else [link.receive(timeout_s)]
    except TimeoutError:
        return False
    except LinkClosedError:
        lost[link.rank] = f"{link} has ended"
        return True
    for frame in frames:
        if frame.op is Op.FAILED:
            lost[link.rank] = f"{link} failed: {unpack_text(frame.arrays[0])}"
    return bool(frames)


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


def _keep_alive(sock: socket.socket) -> None:
    """A machine that is cut off says nothing: after half a minute the system takes the connection for closed."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
