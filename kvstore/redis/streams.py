"""Sockets whose every wait ends by a deadline, however the other side behaves.

A socket's own timeout starts anew with every receive, so a server that sends a byte now and then holds a reader for
as long as it likes. Here a deadline is a point in time, and all receives and sends of a reply share it.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvstore.base import StoreFault

# The kernel takes at most 1024 buffers in one call.
MAX_BUFFERS = 512
# Parts smaller than this together go into one TLS record instead of one each.
JOINED_BYTES = 64 << 10
# By so much a deadline may be overrun, to spare a system call for each piece of a fast stream.
SLACK_S = 0.002
_CLOSED = "the server closed the connection"


class Stream(ABC):
    """Bytes to and from a server. One thread at a time, but for `shut`.

    Args:
        connected: the socket.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    @abstractmethod
    def receive(self, view: memoryview, whole: bool, deadline: float) -> int:
        """Receive into `view` (bytes, writable): all of it, or (not whole) at least one byte; return the count.

        Raises:
            StoreFault: late, unreachable or broken; the stream cannot be used again.
        """

    @abstractmethod
    def send(self, parts: Sequence[bytes | memoryview], deadline: float) -> None:
        """Send all parts, one after another.

        Raises:
            StoreFault: as in `receive`.
        """

    @abstractmethod
    def quiet(self) -> bool:
        """Tell whether it is open and nothing waits to be read: what must hold between two uses."""

    def shut(self) -> None:
        """Make a thread that waits on it stop waiting; from any thread."""
        try:
            # Not SSLSocket's own: that one takes the TLS state away from under a thread that reads.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Give the descriptor back."""
        self._socket.close()


def remaining(deadline: float) -> float:
    """Return seconds until the deadline.

    Raises:
        StoreFault: late, when it has passed.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise StoreFault("late", "the deadline passed")
    return left


class PlainStream(Stream):
    """TCP or a unix socket: whole values arrive in one call, straight into the caller's memory.

    A blocking socket with a receive timeout and MSG_WAITALL: for the kernel that timeout bounds the whole call. Sends
    wait by polling, for on a unix socket the kernel's send timeout counts anew for every few kilobytes.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(None)
        super().__init__(connected)
        self._timeout = 0.0
        self._writable = select.poll()
        self._writable.register(connected, select.POLLOUT)

    def receive(self, view: memoryview, whole: bool, deadline: float) -> int:
        """Receive all of `view`, or at least one byte."""
        flags = socket.MSG_WAITALL if whole else 0
        done = 0
        while True:
            left = remaining(deadline)
            try:
                if not 0 <= self._timeout - left <= SLACK_S:
                    self._set_timeout(left)
                count = self._socket.recv_into(view[done:], 0, flags)
            except BlockingIOError:
                raise StoreFault("late", "the server did not answer in time") from None
            except OSError as error:
                raise StoreFault("unreachable", f"receiving failed: {error.strerror or error}") from error
            if count == 0:
                raise StoreFault("unreachable", _CLOSED)
            done += count
            if not whole or done == len(view):
                return done

    def send(self, parts: Sequence[bytes | memoryview], deadline: float) -> None:
        """Send all parts without joining them."""
        left = [memoryview(part).cast("B") for part in parts if len(part)]
        while left:
            try:
                count = self._socket.sendmsg(left[:MAX_BUFFERS], (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._writable.poll(remaining(deadline) * 1e3 + 1)
                continue
            except OSError as error:
                raise StoreFault("unreachable", f"sending failed: {error.strerror or error}") from error
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    def quiet(self) -> bool:
        """See `Stream.quiet`."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def _set_timeout(self, seconds: float) -> None:
        microseconds = int(seconds * 1e6) + 1  # 0 would mean for ever
        timeout = struct.pack("@ll", *divmod(microseconds, 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        self._timeout = seconds


class TlsStream(Stream):
    """TLS: records are decrypted one by one, each with what is left of the time."""

    def __init__(self, connected: ssl.SSLSocket) -> None:
        super().__init__(connected)
        self._tls = connected
        self._readable = select.poll()
        self._readable.register(connected, select.POLLIN)

    def receive(self, view: memoryview, whole: bool, deadline: float) -> int:
        """Receive all of `view`, or at least one byte."""
        done = 0
        while True:
            try:
                self._socket.settimeout(remaining(deadline))
                count = self._socket.recv_into(view[done:])
            except (OSError, ValueError) as error:
                raise _tls_fault("receiving", error) from error
            if count == 0:
                raise StoreFault("unreachable", _CLOSED)
            done += count
            if not whole or done == len(view):
                return done

    def send(self, parts: Sequence[bytes | memoryview], deadline: float) -> None:
        """Send all parts; small ones in one record."""
        if sum(len(part) for part in parts) <= JOINED_BYTES:
            parts = [b"".join(parts)]
        for part in parts:
            view = memoryview(part).cast("B")
            while len(view):
                try:
                    self._socket.settimeout(remaining(deadline))
                    view = view[self._socket.send(view) :]
                except (OSError, ValueError) as error:
                    raise _tls_fault("sending", error) from error

    def quiet(self) -> bool:
        """See `Stream.quiet`."""
        try:
            return not self._tls.pending() and not self._readable.poll(0)
        except (OSError, ValueError):
            return False


def _tls_fault(doing: str, error: Exception) -> StoreFault:
    if isinstance(error, TimeoutError):
        return StoreFault("late", "the server did not answer in time")
    if isinstance(error, ssl.SSLError):
        return StoreFault("broken", f"{doing} over TLS failed: {error.reason or error}")
    return StoreFault("unreachable", f"{doing} failed: {error}")
