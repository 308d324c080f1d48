"""Reading a batch's file, which may be large, while interactive requests run."""

from __future__ import annotations

import asyncio
import codecs
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import IO, Generic, TypeVar

T = TypeVar("T")
K = TypeVar("K")
D = TypeVar("D", str, bytes)

PIECE = 1 << 20  # bytes
WINDOW_BYTES = 16 << 20  # of lines that are put in order at once
AT_ONCE = 16  # items read by one visit to a thread


def numbered_lines(file: IO[bytes], most: int) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, with their numbers from 1, without byte order marks: joined files have several.

    Of a line that is longer than `most` bytes, `most + 1` are given, and no more is ever held.

    Raises:
        OSError: the file cannot be read.
    """
    number = 0
    while rest := file.readline(most + 1 + len(codecs.BOM_UTF8)):
        number += 1
        data = rest.removeprefix(codecs.BOM_UTF8)[: most + 1]
        while len(data) > most and not rest.endswith(b"\n"):
            if not (rest := file.readline(PIECE)):
                break
        if data.strip():
            yield number, data


def windows(lines: Iterable[tuple[K, D]], most: int, most_bytes: int = WINDOW_BYTES) -> Iterator[list[tuple[K, D]]]:
    """Yield windows of at most `most` lines, each with its value; the last line of one may exceed `most_bytes`."""
    window, size = list[tuple[K, D]](), 0
    for key, data in lines:
        window.append((key, data))
        size += len(data)
        if len(window) == most or size >= most_bytes:
            yield window
            window, size = [], 0
    if window:
        yield window


class ReadAhead(Generic[T]):
    """Items of a generator that reads files, a few at a time, in a thread.

    Args:
        items: closed by `close`.
    """

    def __init__(self, items: Generator[T, None, None]) -> None:
        self._items = items
        self._ready: deque[T] = deque()
        self._reading: asyncio.Task[list[T]] | None = None
        self._over = False

    async def next(self) -> T | None:
        """The next item, each to one caller only; None: there are no more.

        Raises:
            Exception: what reading raises, to all who wait for it.
        """
        while not self._ready and not self._over:
            if self._reading is None:
                self._reading = asyncio.create_task(asyncio.to_thread(lambda: list(islice(self._items, AT_ONCE))))
            reading = self._reading
            found = await asyncio.shield(reading)  # who gives up waiting does not end it: others wait too
            if self._reading is reading:
                self._reading, self._over = None, not found
                self._ready.extend(found)
        return self._ready.popleft() if self._ready else None

    async def close(self) -> None:
        """Close the generator, once nothing reads it any more."""
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)
        self._items.close()
