"""Reads of one run of chunks in worker threads: probe, pipelined reads, decryption and decoding during the transfer.

A chunk is handed out only after all of its values were verified and decoded: memory that a failed read left half
written is never used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition

import torch

from kvstore.base import ByteStore, StoreFault
from kvstore.encodings import Encoding, Encodings
from kvstore.keys import Link
from kvstore.lookup.controller import Availability, Controller, Decision, FetchQuery, Level
from kvstore.lookup.single_flight import Slot
from kvstore.types import Counts
from kvstore.value import OVERHEAD_BYTES, ValueRefused

log = logging.getLogger(__name__)

GOOD_SHARE = 0.5  # of the time to compute everything: quality is given up for speed only above it
HASTE = 4.0  # a read may take this many times its estimate before its connection is dropped
LEAST_READ_S = 0.25
LEAST_WAIT_S = 0.05
REMOVE_S = 0.25
VALUES_AHEAD = 8  # being received or decoded
POLL_S = 0.05  # interval at which a wait for buffers or decoders checks whether the run still goes
NOT_REMOVED = frozenset({"version", "codec", "internal"})  # another process of ours may well be able to read it


@dataclass(frozen=True, slots=True)
class ReadContext:
    """Dependencies of every read of a model."""

    store: ByteStore
    encodings: Encodings
    controller: Controller
    counts: Counts
    decoders: Executor
    ttl_ms: int
    clock: Callable[[], float] = time.monotonic

    def expected_bytes(self, encoding: Encoding) -> int:
        """Estimate the bytes of a chunk's values."""
        return self.controller.chunk_bytes(encoding.codec.name, self.encodings.raw_bytes, encoding.most_bytes)


@dataclass(slots=True)
class _Chunk:
    """A chunk being read: its place in the run, its tensor, and how many of its values are not decoded yet."""

    index: int
    encoding: Encoding
    kv: torch.Tensor
    missing: int


class Run:
    """One run of chunks, read in order until the controller, a fault or the requester ends it.

    Args:
        context: dependencies.
        links: the chunks, in order.
        slots: of the chunks; every one is settled when the run has ended.
        lossy: whether lossy codecs may be used.
        rest: seconds to compute everything that is missing after 0, 1, ... of the chunks.
        deadline: the request's, monotonic seconds.
        wake: called when something has changed.

    Attributes:
        limit: when the requester should give up: nothing came for longer than it should have taken.
        decision: the first that was made.
        fault: whether the store failed.
        stored: chunks of the run that are in the store, from the first on; None before it is known.
    """

    def __init__(
        self,
        context: ReadContext,
        links: Sequence[Link],
        slots: Sequence[Slot],
        lossy: bool,
        rest: Sequence[float],
        deadline: float,
        wake: Callable[[], None],
    ) -> None:
        self.context = context
        self._links = links
        self._slots = slots
        self._lossy = lossy
        self._rest = rest
        self._wake = wake
        self._began = context.clock()
        self._lock = Condition()
        self._availability = Availability({})
        self._left = False
        self._broken = False
        self._ended = False
        self._spoilt: list[bytes] = []
        self._decoding = 0
        self._own_bytes = 0
        self._patience = max(LEAST_WAIT_S, GOOD_SHARE * rest[0])
        self.deadline = deadline
        self.limit = min(deadline, self._began + self._patience)
        self.decision: Decision | None = None
        self.fault = False
        self.stored: int | None = None

    @property
    def stopping(self) -> bool:
        """Whether nothing more is to be read."""
        return self._left or self._broken or self.context.clock() >= self.deadline

    def leave(self, stalled: bool = False) -> None:
        """End the run soon; chunks that have not arrived are left to other requests.

        Args:
            stalled: whether the reason is that nothing came.
        """
        self._left = True
        for slot in self._slots:
            slot.settle("left")
        if stalled:
            waited = self.context.clock() - self._began
            self.context.controller.stalled(self.context.encodings.raw_bytes, waited)

    def __call__(self) -> None:
        """Read; blocks, and ends by the deadline."""
        try:
            if not self._left:
                self._read_all()
        except StoreFault as fault:
            self.fault = True
            self.context.counts.fault(fault.kind)
        except Exception:
            self.fault = True
            self.context.counts.fault("internal")
            log.exception("reading from the prefix store failed")
        finally:
            with self._lock:
                self._ended = True
            self._finish()

    def _finish(self) -> None:
        """Settle what has not come, once the last value is decoded; remove the values that were refused."""
        with self._lock:
            if not self._ended or self._decoding:
                return
            spoilt, self._spoilt = self._spoilt, []
        for slot in self._slots:
            slot.settle("left" if self._left else "missing")
        self._wake()
        if spoilt:  # they would be refused for ever: a value that is there is never overwritten
            self.context.store.reset_connections()
            with suppress(StoreFault):
                self.context.store.delete(spoilt, self.context.clock() + REMOVE_S)

    def _read_all(self) -> None:
        """Decide and read until there is nothing more to fetch."""
        self._availability = Availability(_probe(self.context, self._links, self._lossy, self.deadline))
        self.stored = self._availability.most
        done = 0
        while not self.stopping:
            encoding, decision = self._decide(done)
            self.decision = self.decision or decision
            if encoding is not None:
                transfer = self._read(encoding, done, decision)
                done += transfer.values // len(self.context.encodings.groups)
                if not transfer.stopped and transfer.values < transfer.asked:
                    self._availability.cut(encoding, done)  # the next one is not there, or did not come in time
            if encoding is None or self._availability.is_refused:
                refused = self._first_refused()
                if refused is None:
                    return
                done = refused

    def _first_refused(self) -> int | None:
        """Return where to continue in another encoding, once all is decoded; None: nothing was refused."""
        if len(self._availability) == 1:
            return None
        with self._lock:
            while self._decoding and not self.stopping:
                self._lock.wait(POLL_S)
        refused = self._availability.take_refused()
        if refused is not None:
            self.context.store.reset_connections()
        return refused

    def _decide(self, done: int) -> tuple[Encoding | None, Decision]:
        """Choose the encoding of the chunks behind the first `done`; None: fetch no more."""
        context, now = self.context, self.context.clock()
        found = self._availability.after(done)
        query = FetchQuery(
            levels=[Level(each.codec.name, context.expected_bytes(each), count) for each, count in found.items()],
            raw_bytes=context.encodings.raw_bytes,
            rest=lambda chunks: self._rest[done + chunks],
            elapsed_s=now - self._began,
            target_s=GOOD_SHARE * self._rest[0],
            budget_s=max(0.0, self.deadline - now),
            own_bytes=self._own_bytes,
        )
        decision = context.controller.decide(query)
        log.debug("prefix store: after %d chunks %s; levels %s", done, decision, query.levels)
        if not decision.chunks:
            return None, decision
        self._patience = decision.patience_s
        self.limit = min(self.deadline, now + self._patience)
        return next(each for each in found if each.codec.name == decision.codec), decision

    def _read(self, encoding: Encoding, done: int, decision: Decision) -> _Transfer:
        """Read the chunks that were decided on."""
        context = self.context
        links = self._links[done : done + decision.chunks]
        keys = [key for link in links for key in context.encodings.keys(link, encoding)]
        transfer = _Transfer(self, encoding, done, len(keys))
        self._own_bytes = context.expected_bytes(encoding) * len(links)
        context.controller.queue(self._own_bytes)
        # While a link is only being tried its estimate means nothing: allow the time that computing would take.
        expected_s = decision.compute_s if decision.explores else decision.expected_s
        most = max(LEAST_READ_S, HASTE * (expected_s - (context.clock() - self._began)))
        deadline = min(self.deadline, context.clock() + most)
        try:
            context.store.read(keys, transfer.place, transfer.done, context.ttl_ms, deadline)
        finally:
            context.controller.queue(-self._own_bytes)
            self._own_bytes = 0
            transfer.end()
        return transfer

    def continues(self, encoding: Encoding, done: int) -> bool:
        """Tell whether the chunk after the first `done` should come in the same encoding."""
        if self.stopping or self._availability.is_refused or done >= len(self._links):
            return False
        return self._decide(done)[0] == encoding

    def take_buffer(self) -> bytearray | None:
        """Return memory for a value, once few enough are being decoded; None when it is too late for the run."""
        with self._lock:
            while not self.stopping:
                if self._decoding < VALUES_AHEAD:
                    return self.context.encodings.buffers.take()
                self._lock.wait(POLL_S)
        return None

    def remove_later(self, encoding: Encoding, index: int, group: int) -> None:
        """Note that no process can use a value: it is removed when the run has ended."""
        with self._lock:
            self._spoilt.append(self.context.encodings.keys(self._links[index], encoding)[group])

    def decode(self, chunk: _Chunk, group: int, buffer: bytearray, size: int) -> None:
        """Have a value, the first `size` bytes of `buffer`, verified and decoded during the transfer."""
        with self._lock:
            self._decoding += 1
        try:
            self.context.decoders.submit(self._decode, chunk, group, buffer, size)
        except RuntimeError:  # the store is being closed
            self._decoded(buffer)

    def _decode(self, chunk: _Chunk, group: int, buffer: bytearray, size: int) -> None:
        context, began = self.context, self.context.clock()
        encodings, encoding = context.encodings, chunk.encoding
        try:
            if not self._left:
                encodings.open(self._links[chunk.index], encoding, group, memoryview(buffer)[:size], chunk.kv)
                took = context.clock() - began
                context.controller.decoded(encoding.codec.name, encodings.groups[group].raw_bytes, took)
                self._complete(chunk)
        except ValueRefused as refusal:
            self._refuse(chunk, group, refusal.reason)
        except ValueError:
            self._refuse(chunk, group, "codec")
        except Exception:
            log.exception("decoding a value of the prefix store failed")
            self._refuse(chunk, group, "internal")
        finally:
            self._decoded(buffer)

    def _decoded(self, buffer: bytearray) -> None:
        self.context.encodings.buffers.give(buffer)
        with self._lock:
            self._decoding -= 1
            self._lock.notify_all()
        self._finish()

    def _complete(self, chunk: _Chunk) -> None:
        """Count a decoded value; hand out the chunk with its last one."""
        with self._lock:
            chunk.missing -= 1
            complete = chunk.missing == 0
            self.limit = max(self.limit, min(self.deadline, self.context.clock() + self._patience))
        if complete:
            self._slots[chunk.index].settle("done", chunk.kv, chunk.encoding.quality)
            self._wake()

    def _refuse(self, chunk: _Chunk, group: int, reason: str) -> None:
        before = self.context.counts.fault(reason)
        level = logging.DEBUG if before else logging.WARNING
        log.log(level, "prefix store: a value was refused (%s); it is computed instead", reason)
        if reason not in NOT_REMOVED:
            self.remove_later(chunk.encoding, chunk.index, group)
        if self._availability.refuse(chunk.encoding, chunk.index):
            return
        self._broken = True
        for slot in self._slots[chunk.index :]:
            slot.settle("missing")
        self._wake()


class _Transfer:
    """One pipelined read: where the values of some chunks go, and what their arrival says about the link.

    Args:
        run: to which the chunks belong.
        encoding: in which they are read.
        first: place of the first chunk in the run.
        asked: number of values asked for.

    Attributes:
        asked: as given.
        values: how many came.
        stopped: whether the read was ended before all had come.
    """

    def __init__(self, run: Run, encoding: Encoding, first: int, asked: int) -> None:
        self._run = run
        self._context = run.context
        self._groups = run.context.encodings.groups
        self._encoding = encoding
        self._first = first
        self._buffer: bytearray | None = None
        self._size = 0
        self._chunk: _Chunk | None = None
        self._last = run.context.clock()
        self.asked = asked
        self.values = 0
        self.stopped = False

    def place(self, index: int, size: int) -> memoryview | None:
        """Return memory for value `index` of `size` bytes; None if it is longer than any value, or too late."""
        chunk, group = divmod(index, len(self._groups))
        if size > self._encoding.codec.max_bytes(self._groups[group]) + OVERHEAD_BYTES:
            self._context.counts.fault("length")
            self._run.remove_later(self._encoding, self._first + chunk, group)
            return None
        began = self._context.clock()
        self._buffer, self._size = self._run.take_buffer(), size
        self._last += self._context.clock() - began  # our own slowness is not the link's
        return None if self._buffer is None else memoryview(self._buffer)[:size]

    def done(self, index: int) -> bool:
        """Have value `index`, which is complete, decoded; return whether to read on."""
        buffer, self._buffer = self._buffer, None
        assert buffer is not None
        chunk, group = divmod(index, len(self._groups))
        self._measure(index, self._groups[group].raw_bytes)
        self.values = index + 1
        place = self._first + chunk
        if group == 0 or self._chunk is None:
            kv = self._context.encodings.empty_chunk()
            self._chunk = _Chunk(place, self._encoding, kv, len(self._groups))
        self._run.decode(self._chunk, group, buffer, self._size)
        if group == len(self._groups) - 1 and not self._run.continues(self._encoding, place + 1):
            self.stopped = True
            return self.values == self.asked  # otherwise replies are on their way, and the connection is dropped
        return True

    def _measure(self, index: int, raw_bytes: int) -> None:
        now = self._context.clock()
        took, self._last = now - self._last, now
        if index == 0:  # the request's own way is not the value's
            took = max(took - self._context.controller.trip_s, 0.1 * took)
        self._context.counts.read(self._size)
        self._context.controller.received(self._encoding.codec.name, self._size, raw_bytes, took)

    def end(self) -> None:
        """Return the buffer of a value that did not arrive whole."""
        if self._buffer is not None:
            self._context.encodings.buffers.give(self._buffer)
            self._buffer = None


def _probe(context: ReadContext, links: Sequence[Link], lossy: bool, deadline: float) -> dict[Encoding, int]:
    """Count the leading chunks that are in the store, in one round trip for each encoding."""
    counts = {}
    for encoding in context.encodings.readable(lossy):
        keys = [key for link in links for key in context.encodings.keys(link, encoding)]
        began = context.clock()
        counts[encoding] = context.store.count_prefix(keys, deadline) // len(context.encodings.groups)
        context.controller.round_trip(context.clock() - began)
    return counts
