"""A connection that speaks RESP2: bulk values arrive in the caller's memory, and every reply has a total deadline.

redis-py receives a value into buffers of its own and copies it once or twice, with hiredis too. Read this way, values
of 1 MiB come 2 to 3 times as fast as by MGET (docs/results/redis_access.md). Its timeouts count for each receive: a
server that dribbles held a pipeline with a timeout of 0.2 s for 12 s. Other replies are parsed here as well, as they
come over the same connection and buffer: hiredis is not faster for the row of integers that a probe gets (0.18 against
0.17 ms for 128), and takes a bulk string of another length than announced (`$3`, then `abcd`) for a good one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.base import StoreFault
from kvstore.redis.streams import Stream

# Protocol lines are short; what follows one in the same receive is copied once more, so the buffer stays small.
BUFFER_BYTES = 4096
# No honest reply to what we ask is longer or deeper.
MAX_BULK_BYTES = 512 << 20
MAX_REPLY_BYTES = 64 << 20
MAX_ITEMS = 1 << 20
MAX_DEPTH = 8
_ONES = re.compile(rb"(?::1\r\n)*")


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The server's refusal of one command.

    Attributes:
        text: as the server wrote it; its first word is the kind.
    """

    text: str

    @property
    def code(self) -> str:
        """First word: ERR, MOVED, OOM, NOPERM, ..."""
        return self.text.partition(" ")[0]


Reply = int | bytes | ErrorReply | None | list["Reply"]


def command(*words: bytes | int | str) -> bytes:
    """Pack one command."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        raw = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
    return b"".join(parts)


@functools.lru_cache(maxsize=256)
def _frame(before: tuple[bytes, ...], after: tuple[bytes | int, ...]) -> tuple[bytes, bytes]:
    head = b"*%d\r\n" % (len(before) + 1 + len(after)) + command(*before).partition(b"\r\n")[2]
    return head, command(*after).partition(b"\r\n")[2]


def per_key(before: tuple[bytes, ...], keys: Sequence[bytes], after: tuple[bytes | int, ...] = ()) -> list[bytes]:
    """Pack the same command for each of the keys: words before the key, the key, words after it."""
    head, tail = _frame(before, after)
    return [b"%b$%d\r\n%b\r\n%b" % (head, len(key), key, tail) for key in keys]


def set_once(key: bytes, parts: Sequence[memoryview | bytes], ttl_ms: int) -> list[bytes | memoryview]:
    """Pack `SET key value PX ttl NX` as parts to send; the value's parts are not copied."""
    views = [memoryview(part).cast("B") for part in parts]
    size = sum(len(view) for view in views)
    head = b"*6\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, size)
    life = b"%d" % ttl_ms
    return [head, *views, b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n$2\r\nNX\r\n" % (len(life), life)]


class Connection:
    """One connection to a Redis server. One thread at a time, but for `shut`.

    Replies are taken in the order of the commands. `pending` counts those not taken yet. After any `StoreFault` the
    connection is useless: what else would come could be taken for another command's reply.

    Args:
        stream: connected.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._faulty = False
        self.pending = 0

    @property
    def reusable(self) -> bool:
        """Whether the next command would get its own reply."""
        return not self._faulty and not self.pending and self._start == self._end

    def discard(self) -> None:
        """Mark the connection as not reusable, though no error was seen here."""
        self._faulty = True

    def quiet(self) -> bool:
        """Tell whether it is reusable after lying idle: open, and no reply arrived without a command."""
        return self.reusable and self._stream.quiet()

    def send(self, parts: Sequence[bytes | memoryview], replies: int, deadline: float) -> None:
        """Send commands that get `replies` replies.

        Raises:
            StoreFault: late or unreachable.
        """
        self.pending += replies
        try:
            self._stream.send(parts, deadline)
        except StoreFault:
            self._faulty = True
            raise

    def reply(self, deadline: float) -> Reply:
        """Take the next reply, whole.

        Raises:
            StoreFault: late, unreachable or broken.
        """
        reply = self._parse(deadline, 0)
        self.pending -= 1
        return reply

    def replies(self, count: int, deadline: float) -> list[Reply]:
        """Take the next replies.

        Raises:
            StoreFault: as in `reply`.
        """
        taken: list[Reply] = []
        while len(taken) < count:
            # The answer to a probe is mostly a row of ones.
            run = _ONES.match(self._buffer, self._start, self._end)
            ones = min((run.end() - self._start) // 4 if run else 0, count - len(taken))
            taken += [1] * ones
            self._start += 4 * ones
            self.pending -= ones
            if len(taken) < count:
                taken.append(self.reply(deadline))
        return taken

    def bulk_size(self, deadline: float) -> int | ErrorReply | None:
        """Begin to take a value: its bytes (then call `bulk_into`); None or an error: there is none to take.

        Raises:
            StoreFault: late, unreachable or broken, as when the reply is no value at all.
        """
        line = self._line(deadline)
        if line[:1] == b"$":
            size = self._number(line, -1, MAX_BULK_BYTES)
            if size >= 0:
                return size
            self.pending -= 1
            return None
        if line[:1] == b"-":
            self.pending -= 1
            return _error(line)
        raise self._broken("a reply that is no value")

    def bulk_into(self, view: memoryview, deadline: float) -> None:
        """Take the value that `bulk_size` announced into `view` (bytes, writable, of that length).

        Raises:
            StoreFault: late, unreachable or broken; `view` then holds anything.
        """
        ready = min(self._end - self._start, len(view))
        view[:ready] = self._view[self._start : self._start + ready]
        self._start += ready
        if ready < len(view):
            self._receive(view[ready:], True, deadline)
        self._line_end(deadline)
        self.pending -= 1

    def shut(self) -> None:
        """Make a thread that waits on it stop waiting; from any thread."""
        self._stream.shut()

    def close(self) -> None:
        """Close it."""
        self._faulty = True
        self._stream.close()

    def _parse(self, deadline: float, depth: int) -> Reply:
        line = self._line(deadline)
        kind = line[:1]
        if kind == b":":
            return self._number(line, -(1 << 63), 1 << 63)
        if kind == b"+":
            return line[1:]
        if kind == b"-":
            return _error(line)
        if kind == b"$":
            size = self._number(line, -1, MAX_REPLY_BYTES)
            return None if size < 0 else self._bulk(size, deadline)
        if kind == b"*" and depth < MAX_DEPTH:
            count = self._number(line, -1, MAX_ITEMS)
            return None if count < 0 else [self._parse(deadline, depth + 1) for _ in range(count)]
        raise self._broken("a reply of no known kind")

    def _bulk(self, size: int, deadline: float) -> bytes:
        value = bytearray(size)
        self.pending += 1
        self.bulk_into(memoryview(value), deadline)
        return bytes(value)

    def _line(self, deadline: float) -> bytes:
        """Take the next line, without its end."""
        searched = self._start
        while True:
            end = self._buffer.find(b"\r\n", searched, self._end)
            if end >= 0:
                line = bytes(self._view[self._start : end])
                self._start = end + 2
                return line
            self._fill(deadline)
            searched = self._start

    def _line_end(self, deadline: float) -> None:
        while self._end - self._start < 2:
            self._fill(deadline)
        if self._buffer[self._start : self._start + 2] != b"\r\n":
            raise self._broken("a value of another length than announced")
        self._start += 2

    def _fill(self, deadline: float) -> None:
        """Receive more into the buffer."""
        held = self._end - self._start
        if held == BUFFER_BYTES:
            raise self._broken("a line without end")
        if self._start:
            self._buffer[:held] = self._buffer[self._start : self._end]
            self._start, self._end = 0, held
        self._end += self._receive(self._view[self._end :], False, deadline)

    def _receive(self, view: memoryview, whole: bool, deadline: float) -> int:
        try:
            return self._stream.receive(view, whole, deadline)
        except StoreFault:
            self._faulty = True
            raise

    def _number(self, line: bytes, low: int, high: int) -> int:
        digits = line[1:]
        if not digits.removeprefix(b"-").isdigit() or len(digits) > 20 or not low <= int(digits) <= high:
            raise self._broken("a number that is none or out of range")
        return int(digits)

    def _broken(self, what: str) -> StoreFault:
        self._faulty = True
        return StoreFault("broken", f"the server sent {what}")


def _error(line: bytes) -> ErrorReply:
    return ErrorReply(line[1:].decode("utf-8", "replace"))
