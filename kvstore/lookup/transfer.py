"""One pipelined read of a run: where its values go, and what their arrival says about the link."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Semaphore
from typing import TYPE_CHECKING

import torch

from kvstore.encodings import BufferPool, Encoding
from kvstore.value import OVERHEAD_BYTES

if TYPE_CHECKING:
    from kvstore.lookup.reader import Run


VALUES_AHEAD = 8  # received and not decoded yet
LOOK_S = 0.05  # whoever waits for memory or decoders looks so often whether it still should


class Staging:
    """Memory for the values of a run, for few at once. Any thread may call.

    Args:
        buffers: where it comes from.
    """

    def __init__(self, buffers: BufferPool) -> None:
        self._buffers = buffers
        self._ahead = Semaphore(VALUES_AHEAD)

    def take(self, run: Run) -> bytearray | None:
        """Memory for a value, when few enough are being decoded; None when it is too late for the run."""
        while not run.stopping:
            if self._ahead.acquire(timeout=LOOK_S):
                return self._buffers.take()
        return None

    def give(self, buffer: bytearray) -> None:
        """Nobody uses it any more."""
        self._buffers.give(buffer)
        self._ahead.release()


@dataclass(slots=True)
class Chunk:
    """A chunk on its way: the tensor, and how many of its values are not in place."""

    kv: torch.Tensor
    left: int


class Transfer:
    """Takes the values of some chunks in one encoding.

    Args:
        run: whose they are.
        encoding: they are asked for in.
        first: place of the first chunk in the run.
        asked: values that were asked for.

    Attributes:
        asked: as given.
        values: how many came.
        stopped: whether no more were wanted before all had come.
    """

    def __init__(self, run: Run, encoding: Encoding, first: int, asked: int) -> None:
        self._run = run
        self._context = run.context
        self._encoding = encoding
        self._first = first
        self._buffer: bytearray | None = None
        self._size = 0
        self._chunk: Chunk | None = None
        self._last = run.context.clock()
        self.asked = asked
        self.values = 0
        self.stopped = False

    def place(self, index: int, size: int) -> memoryview | None:
        """Where value `index` of `size` bytes goes; None where no value has so many, or it comes too late."""
        groups = self._context.encodings.groups
        if size > self._encoding.codec.max_bytes(groups[index % len(groups)]) + OVERHEAD_BYTES:
            self._context.counts.fault("length")
            chunk, group = divmod(index, len(groups))
            self._run.spoil(self._encoding, self._first + chunk, group)
            return None
        began = self._context.clock()
        self._buffer = self._run.staging.take(self._run)
        self._last += self._context.clock() - began  # our own slowness is not the link's
        if self._buffer is None:
            return None
        self._size = size
        return memoryview(self._buffer)[:size]

    def done(self, index: int) -> bool:
        """Value `index` is complete."""
        buffer, self._buffer = self._buffer, None
        assert buffer is not None
        groups = self._context.encodings.groups
        chunk, group = divmod(index, len(groups))
        self._measure(index, groups[group].raw_bytes)
        self.values = index + 1
        if group == 0 or self._chunk is None:
            self._chunk = Chunk(self._context.encodings.empty_chunk(), len(groups))
        place = self._first + chunk
        self._run.decode(self._encoding, place, group, memoryview(buffer)[: self._size], buffer, self._chunk)
        if group == len(groups) - 1 and not self._run.goes_on(self._encoding, place + 1):
            self.stopped = True
            return self.values == self.asked  # otherwise answers are on their way, and the connection is given up
        return True

    def _measure(self, index: int, raw_bytes: int) -> None:
        now = self._context.clock()
        took, self._last = now - self._last, now
        if index == 0:  # the request's own way is not the value's
            took = max(took - self._context.controller.trip_s, 0.1 * took)
        self._context.counts.read(self._size)
        self._context.controller.received(self._encoding.codec.name, self._size, raw_bytes, took)

    def end(self) -> None:
        """Give back what nothing complete came into."""
        if self._buffer is not None:
            self._run.staging.give(self._buffer)
            self._buffer = None
