"""Reads one run of chunks in worker threads: probe, pipelined reads, checks and decoding beside the transfer.

A chunk is handed out when all of its values were checked and decoded, and not before: memory that a failed read
leaves half written is nobody's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition

from kvstore.base import ByteStore, StoreFault
from kvstore.counts import Counts
from kvstore.encodings import Encoding, Encodings
from kvstore.keys import Link
from kvstore.lookup.availability import Availability
from kvstore.lookup.controller import Ask, Controller, Decision, Level
from kvstore.lookup.single_flight import Slot
from kvstore.lookup.transfer import LOOK_S, Chunk, Staging, Transfer
from kvstore.value import ValueRefused

log = logging.getLogger(__name__)

GOOD_SHARE = 0.5  # of the time to compute everything: quality is given up for speed only above it
HASTE = 4.0  # a read may take this many times its estimate before its connection is given up
LEAST_READ_S = 0.25
LEAST_WAIT_S = 0.05
REMOVE_S = 0.25
NOT_REMOVED = frozenset({"version", "codec", "internal"})  # another process of ours may well be able to read it


@dataclass(frozen=True, slots=True)
class ReadContext:
    """What every read of a model uses."""

    store: ByteStore
    encodings: Encodings
    controller: Controller
    counts: Counts
    decoders: Executor
    ttl_ms: int
    clock: Callable[[], float] = time.monotonic

    def expected_bytes(self, encoding: Encoding) -> int:
        """Of a chunk's values."""
        return self.controller.chunk_bytes(encoding.codec.name, self.encodings.raw_bytes, encoding.most_bytes)


class Run:
    """One run of chunks, read in order until the controller, a fault or the requester ends it.

    Args:
        context: what it works with.
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
        staging: memory for its values.
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
        self.staging = Staging(context.encodings.buffers)
        self._lock = Condition()
        self._availability = Availability()
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
        """Nobody waits for it any more: it ends soon, and what is not there yet is left to others.

        Args:
            stalled: whether that is because nothing came.
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
        """Settle what has not come, once the last value is decoded."""
        with self._lock:
            if not self._ended or self._decoding:
                return
            spoilt, self._spoilt = self._spoilt, []
        for slot in self._slots:
            slot.settle("left" if self._left else "missing")
        self._wake()
        if spoilt:
            _remove(self.context, spoilt)

    def _read_all(self) -> None:
        """Decide and read until there is nothing more to fetch."""
        self._availability.probe(self.context, self._links, self._lossy, self.deadline)
        self.stored = self._availability.most
        done = 0
        while not self.stopping:
            decision = self._decide(done)
            if self.decision is None:
                self.decision = decision
            if decision.chunks:
                encoding = self._availability.encoding(decision.codec)
                transfer = self._read(encoding, done, decision)
                done += transfer.values // len(self.context.encodings.groups)
                if not transfer.stopped and transfer.values < transfer.asked:
                    self._availability.cut(encoding, done)  # the next one is not there, or did not come in time
            if not decision.chunks or self._availability.is_refused:
                refused = self._first_refused()
                if refused is None:
                    return
                done = refused

    def _first_refused(self) -> int | None:
        """Where to go on in another encoding, once everything that came is decoded; None: nothing was refused."""
        if len(self._availability) == 1:
            return None
        with self._lock:
            while self._decoding and not self.stopping:
                self._lock.wait(LOOK_S)
        refused = self._availability.take_refused()
        if refused is not None:
            self.context.store.reset_connections()
        return refused

    def _decide(self, done: int) -> Decision:
        context, now = self.context, self.context.clock()
        levels = [
            Level(encoding.codec.name, context.expected_bytes(encoding), count)
            for encoding, count in self._availability.after(done).items()
        ]
        ask = Ask(
            levels=levels,
            raw_bytes=context.encodings.raw_bytes,
            rest=lambda chunks: self._rest[done + chunks],
            elapsed_s=now - self._began,
            target_s=GOOD_SHARE * self._rest[0],
            budget_s=max(0.0, self.deadline - now),
            own_bytes=self._own_bytes,
        )
        decision = context.controller.decide(ask)
        if decision.chunks:
            self._patience = decision.patience_s
            self.limit = min(self.deadline, now + self._patience)
        log.debug(
            "prefix store: after %d chunks %s; levels %s, elapsed %.4f, expected %.4f, compute %.4f, other %.4f s%s",
            done, f"{decision.chunks} more as {decision.codec}" if decision.chunks else "compute",
            [(each.codec, each.chunk_bytes, each.available) for each in levels], ask.elapsed_s,
            decision.expected_s, decision.compute_s, decision.other_s, ", trial" if decision.explores else "",
        )  # fmt: skip
        return decision

    def _read(self, encoding: Encoding, done: int, decision: Decision) -> Transfer:
        """Read chunks in one encoding."""
        context = self.context
        links = self._links[done : done + decision.chunks]
        keys = [key for link in links for key in context.encodings.keys(link, encoding)]
        transfer = Transfer(self, encoding, done, len(keys))
        self._own_bytes = context.expected_bytes(encoding) * len(links)
        context.controller.queue(self._own_bytes)
        # Of a link that is only being tried, the estimate is no estimate: it may take what computing would.
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

    def goes_on(self, encoding: Encoding, done: int) -> bool:
        """After `done` chunks: whether the next should come in the same encoding too."""
        if self.stopping or self._availability.is_refused or done >= len(self._links):
            return False
        return self._decide(done).codec == encoding.codec.name

    def spoil(self, encoding: Encoding, index: int, group: int) -> None:
        """A value is of no use to anybody: it is removed when the run has ended."""
        with self._lock:
            self._spoilt.append(self.context.encodings.keys(self._links[index], encoding)[group])

    def decode(
        self, encoding: Encoding, index: int, group: int, value: memoryview, buffer: bytearray, chunk: Chunk
    ) -> None:
        """Have a value, which lies in `buffer`, decoded beside the transfer."""
        with self._lock:
            self._decoding += 1
        try:
            self.context.decoders.submit(self._decode, encoding, index, group, value, buffer, chunk)
        except RuntimeError:  # the store is being closed
            self._decoded(buffer)

    def _decode(
        self, encoding: Encoding, index: int, group: int, value: memoryview, buffer: bytearray, chunk: Chunk
    ) -> None:
        context, began = self.context, self.context.clock()
        try:
            if not self._left:
                context.encodings.open(self._links[index], encoding, group, value, chunk.kv)
                context.controller.decoded(
                    encoding.codec.name, context.encodings.groups[group].raw_bytes, context.clock() - began
                )
                self._place(encoding, index, chunk)
        except ValueRefused as refusal:
            self._refuse(encoding, index, group, refusal.reason)
        except ValueError:
            self._refuse(encoding, index, group, "codec")
        except Exception:
            log.exception("decoding a value of the prefix store failed")
            self._refuse(encoding, index, group, "internal")
        finally:
            self._decoded(buffer)

    def _decoded(self, buffer: bytearray) -> None:
        self.staging.give(buffer)
        with self._lock:
            self._decoding -= 1
            self._lock.notify_all()
        self._finish()

    def _place(self, encoding: Encoding, index: int, chunk: Chunk) -> None:
        """A value is in its place; with the last of its chunk, the chunk is there."""
        with self._lock:
            chunk.left -= 1
            complete = chunk.left == 0
            self.limit = max(self.limit, min(self.deadline, self.context.clock() + self._patience))
        if complete:
            self._slots[index].settle("done", chunk.kv, encoding.quality)
            self._wake()

    def _refuse(self, encoding: Encoding, index: int, group: int, reason: str) -> None:
        before = self.context.counts.fault(reason)
        level = logging.DEBUG if before else logging.WARNING
        log.log(level, "prefix store: a value was refused (%s); it is computed instead", reason)
        if reason not in NOT_REMOVED:
            self.spoil(encoding, index, group)
        if self._availability.refuse(encoding, index):
            return
        self._broken = True
        for slot in self._slots[index:]:
            slot.settle("missing")
        self._wake()


def _remove(context: ReadContext, keys: list[bytes]) -> None:
    """Values that were refused would be refused for ever: nothing is written over what is there."""
    context.store.reset_connections()
    with suppress(StoreFault):
        context.store.delete(keys, context.clock() + REMOVE_S)
