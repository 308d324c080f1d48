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
from threading import Lock, Semaphore

import torch

from kvstore.base import ByteStore, StoreFault
from kvstore.counts import Counts
from kvstore.forms import Form, Forms
from kvstore.keys import Link
from kvstore.lookup.controller import Ask, Controller, Decision, Level
from kvstore.lookup.flight import Slot
from kvstore.value import OVERHEAD_BYTES, ValueRefused

log = logging.getLogger(__name__)

GOOD_SHARE = 0.5  # of the time to compute everything: quality is given up for speed only above it
VALUES_AHEAD = 8  # received and not decoded yet
HASTE = 4.0  # a read may take this many times its estimate before its connection is given up
LEAST_READ_S = 0.25
LEAST_WAIT_S = 0.05
REMOVE_S = 0.25
NOT_REMOVED = frozenset({"version", "codec", "internal"})  # another process of ours may well be able to read it


@dataclass(frozen=True, slots=True)
class Means:
    """What every read of a model uses."""

    store: ByteStore
    forms: Forms
    controller: Controller
    counts: Counts
    decoders: Executor
    ttl_ms: int
    clock: Callable[[], float] = time.monotonic

    def expected_bytes(self, form: Form) -> int:
        """Of a chunk's values."""
        return self.controller.chunk_bytes(form.codec.name, self.forms.raw_bytes, form.most_bytes)


@dataclass(slots=True)
class _Chunk:
    """A chunk on its way: the tensor, and how many of its values are not in place."""

    kv: torch.Tensor
    left: int


class Run:
    """One run of chunks, read in order until the controller, a fault or the requester ends it.

    Args:
        means: what it works with.
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
        means: Means,
        links: Sequence[Link],
        slots: Sequence[Slot],
        lossy: bool,
        rest: Sequence[float],
        deadline: float,
        wake: Callable[[], None],
    ) -> None:
        self.means = means
        self._links = links
        self._slots = slots
        self._lossy = lossy
        self._rest = rest
        self._wake = wake
        self._began = means.clock()
        self._ahead = Semaphore(VALUES_AHEAD)
        self._lock = Lock()
        self._available: dict[Form, int] = {}  # chunks of the run that there are, from the first on
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
        return self._left or self._broken or self.means.clock() >= self.deadline

    def leave(self, stalled: bool = False) -> None:
        """Nobody waits for it any more: it ends soon, and what is not there yet is left to others.

        Args:
            stalled: whether that is because nothing came.
        """
        self._left = True
        for slot in self._slots:
            slot.settle("left")
        if stalled:
            waited = self.means.clock() - self._began
            self.means.controller.stalled(self.means.forms.raw_bytes, waited)

    def __call__(self) -> None:
        """Read; blocks, and ends by the deadline."""
        try:
            if not self._left:
                self._read_all()
        except StoreFault as fault:
            self.fault = True
            self.means.counts.fault(fault.kind)
        except Exception:
            self.fault = True
            self.means.counts.fault("internal")
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
            _remove(self.means, spoilt)

    def _read_all(self) -> None:
        """Decide and read until there is nothing more to fetch."""
        self._probe()
        done = 0
        while not self.stopping:
            decision = self._decide(done)
            if self.decision is None:
                self.decision = decision
            if not decision.chunks:
                return
            form = next(each for each in self._available if each.codec.name == decision.codec)
            transfer = self._read(form, done, decision)
            done += transfer.values // len(self.means.forms.groups)
            if not transfer.stopped and transfer.values < transfer.asked:
                self._available[form] = done  # the next one is not there, or did not come in time

    def _probe(self) -> None:
        """Find out how many chunks at the start of the run are there, by form; one round trip for each form."""
        means = self.means
        groups = len(means.forms.groups)
        for form in means.forms.readable(self._lossy):
            keys = [key for link in self._links for key in means.forms.keys(link, form)]
            began = means.clock()
            self._available[form] = means.store.count_prefix(keys, self.deadline) // groups
            means.controller.round_trip(means.clock() - began)
        self.stored = max(self._available.values(), default=0)

    def _decide(self, done: int) -> Decision:
        means, now = self.means, self.means.clock()
        levels = [
            Level(form.codec.name, means.expected_bytes(form), count - done)
            for form, count in self._available.items()
            if count > done
        ]
        ask = Ask(
            levels=levels,
            raw_bytes=means.forms.raw_bytes,
            rest=lambda chunks: self._rest[done + chunks],
            elapsed_s=now - self._began,
            target_s=GOOD_SHARE * self._rest[0],
            budget_s=max(0.0, self.deadline - now),
            own_bytes=self._own_bytes,
        )
        decision = means.controller.decide(ask)
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

    def _read(self, form: Form, done: int, decision: Decision) -> _Transfer:
        """Read chunks in one form."""
        means = self.means
        links = self._links[done : done + decision.chunks]
        keys = [key for link in links for key in means.forms.keys(link, form)]
        transfer = _Transfer(self, form, done, len(keys))
        self._own_bytes = means.expected_bytes(form) * len(links)
        means.controller.queue(self._own_bytes)
        # Of a link that is only being tried, the estimate is no estimate: it may take what computing would.
        expected_s = decision.compute_s if decision.explores else decision.expected_s
        most = max(LEAST_READ_S, HASTE * (expected_s - (means.clock() - self._began)))
        deadline = min(self.deadline, means.clock() + most)
        try:
            means.store.read(keys, transfer.place, transfer.done, means.ttl_ms, deadline)
        finally:
            means.controller.queue(-self._own_bytes)
            self._own_bytes = 0
            transfer.end()
        return transfer

    def goes_on(self, form: Form, done: int) -> bool:
        """After `done` chunks: whether the next should come in the same form too."""
        if self.stopping or done >= len(self._links):
            return False
        return self._decide(done).codec == form.codec.name

    def spoil(self, form: Form, index: int, group: int) -> None:
        """A value is of no use to anybody: it is removed when the run has ended."""
        with self._lock:
            self._spoilt.append(self.means.forms.keys(self._links[index], form)[group])

    def take_slab(self) -> bytearray | None:
        """Memory for a value, when few enough are being decoded; None when it is too late."""
        while not self.stopping:
            if self._ahead.acquire(timeout=0.05):
                return self.means.forms.slabs.take()
        return None

    def give_slab(self, slab: bytearray) -> None:
        """Nobody uses it any more."""
        self.means.forms.slabs.give(slab)
        self._ahead.release()

    def decode(self, form: Form, index: int, group: int, value: memoryview, slab: bytearray, chunk: _Chunk) -> None:
        """Have a value, which lies in `slab`, decoded beside the transfer."""
        with self._lock:
            self._decoding += 1
        try:
            self.means.decoders.submit(self._decode, form, index, group, value, slab, chunk)
        except RuntimeError:  # the store is being closed
            self._decoded(slab)

    def _decode(self, form: Form, index: int, group: int, value: memoryview, slab: bytearray, chunk: _Chunk) -> None:
        means, began = self.means, self.means.clock()
        try:
            if not self._left:
                means.forms.open(self._links[index], form, group, value, chunk.kv)
                means.controller.decoded(form.codec.name, means.forms.groups[group].raw_bytes, means.clock() - began)
                self._place(form, index, chunk)
        except ValueRefused as refusal:
            self._refuse(form, index, group, refusal.reason)
        except ValueError:
            self._refuse(form, index, group, "codec")
        except Exception:
            log.exception("decoding a value of the prefix store failed")
            self._refuse(form, index, group, "internal")
        finally:
            self._decoded(slab)

    def _decoded(self, slab: bytearray) -> None:
        self.give_slab(slab)
        with self._lock:
            self._decoding -= 1
        self._finish()

    def _place(self, form: Form, index: int, chunk: _Chunk) -> None:
        """A value is in its place; with the last of its chunk, the chunk is there."""
        with self._lock:
            chunk.left -= 1
            complete = chunk.left == 0
            self.limit = max(self.limit, min(self.deadline, self.means.clock() + self._patience))
        if complete:
            self._slots[index].settle("done", chunk.kv, form.quality)
            self._wake()

    def _refuse(self, form: Form, index: int, group: int, reason: str) -> None:
        before = self.means.counts.fault(reason)
        level = logging.DEBUG if before else logging.WARNING
        log.log(level, "prefix store: a value was refused (%s); it is computed instead", reason)
        self._broken = True
        if reason not in NOT_REMOVED:
            self.spoil(form, index, group)
        for slot in self._slots[index:]:
            slot.settle("missing")
        self._wake()


def _remove(means: Means, keys: list[bytes]) -> None:
    """Values that were refused would be refused for ever: nothing is written over what is there."""
    means.store.distrust()
    with suppress(StoreFault):
        means.store.delete(keys, means.clock() + REMOVE_S)


class _Transfer:
    """One pipelined read: where its values go, and what their arrival says about the link."""

    def __init__(self, run: Run, form: Form, first: int, asked: int) -> None:
        self._run = run
        self._means = run.means
        self._form = form
        self._first = first
        self._slab: bytearray | None = None
        self._size = 0
        self._chunk: _Chunk | None = None
        self._last = run.means.clock()
        self.asked = asked
        self.values = 0
        self.stopped = False

    def place(self, index: int, size: int) -> memoryview | None:
        """Where value `index` of `size` bytes goes; None where no value has so many, or it comes too late."""
        groups = self._means.forms.groups
        if size > self._form.codec.max_bytes(groups[index % len(groups)]) + OVERHEAD_BYTES:
            self._means.counts.fault("length")
            chunk, group = divmod(index, len(groups))
            self._run.spoil(self._form, self._first + chunk, group)
            return None
        began = self._means.clock()
        self._slab = self._run.take_slab()
        self._last += self._means.clock() - began  # our own slowness is not the link's
        if self._slab is None:
            return None
        self._size = size
        return memoryview(self._slab)[:size]

    def done(self, index: int) -> bool:
        """Value `index` is complete."""
        slab, self._slab = self._slab, None
        assert slab is not None
        groups = self._means.forms.groups
        chunk, group = divmod(index, len(groups))
        self._measure(index, groups[group].raw_bytes)
        self.values = index + 1
        if group == 0 or self._chunk is None:
            self._chunk = _Chunk(self._means.forms.empty_chunk(), len(groups))
        place = self._first + chunk
        self._run.decode(self._form, place, group, memoryview(slab)[: self._size], slab, self._chunk)
        if group == len(groups) - 1 and not self._run.goes_on(self._form, place + 1):
            self.stopped = True
            return self.values == self.asked  # otherwise answers are on their way, and the connection is given up
        return True

    def _measure(self, index: int, raw_bytes: int) -> None:
        now = self._means.clock()
        took, self._last = now - self._last, now
        if index == 0:  # the request's own way is not the value's
            took = max(took - self._means.controller.trip_s, 0.1 * took)
        self._means.counts.read(self._size)
        self._means.controller.received(self._form.codec.name, self._size, raw_bytes, took)

    def end(self) -> None:
        """Give back what nothing complete came into."""
        if self._slab is not None:
            self._run.give_slab(self._slab)
            self._slab = None
