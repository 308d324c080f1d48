"""Write-behind: computed chunks go to host memory and Redis in one thread, off the request path."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition, Thread

import torch

from kvstore.base import ByteStore, StoreFault
from kvstore.encodings import Encoding, Encodings
from kvstore.keys import Link
from kvstore.lookup.locks import ComputeLocks
from kvstore.lookup.memory import HostMemory
from kvstore.tenants.quotas import Quotas
from kvstore.types import Counts, Offer

log = logging.getLogger(__name__)

DEPTH_TTL_MS = 5  # a chunk expires, and is evicted, so much earlier than the one before it
MOST_DEPTH = 200
USE_EVERY_S = 10.0  # a chunk's use is sent to Redis no more often
MOST_USED = 10_000  # chunks of which it is known when that was sent


@dataclass(frozen=True, slots=True)
class RemoteTier:
    """Redis as the writer uses it.

    Attributes:
        store: where values go.
        quotas: of the namespaces.
        locks: of this process.
        ttl_ms: life of a value.
        timeout_s: most time for one chunk, seconds.
    """

    store: ByteStore
    quotas: Quotas
    locks: ComputeLocks
    ttl_ms: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class _Job:
    offer: Offer
    encodings: Encodings
    counts: Counts


@dataclass(frozen=True, slots=True)
class _Touch:
    links: tuple[Link, ...]
    encodings: Encodings
    counts: Counts


class Writer:
    """One thread and its queue, shared by the stores of all models.

    Args:
        memory: the host tier.
        remote: Redis; None: there is none.
        capacity: offers that wait; more are refused.
        may_write: whether a tenant may store anything.
        clock: monotonic, seconds.
    """

    def __init__(
        self,
        memory: HostMemory,
        remote: RemoteTier | None,
        capacity: int,
        may_write: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory = memory
        self._may_write = may_write
        self._remote = remote
        self._capacity = capacity
        self._clock = clock
        self._jobs: deque[_Job] = deque()
        self._uses: deque[_Touch] = deque()
        self._sent: OrderedDict[bytes, float] = OrderedDict()
        self._changed = Condition()
        self._busy = False
        self._closed = False
        self._buffers: dict[int, bytearray] = {}
        self._thread: Thread | None = None

    def offer(self, encodings: Encodings, counts: Counts, offer: Offer) -> bool:
        """Take an offer, or drop it where the queue is full: then `done` has been called."""
        with self._changed:
            reason = "closed" if self._closed else "queue" if len(self._jobs) >= self._capacity else ""
            if not reason:
                self._jobs.append(_Job(offer, encodings, counts))
                self._start()
                return True
        counts.drop(reason)
        _finish(offer)
        return False

    def use(self, encodings: Encodings, counts: Counts, links: Sequence[Link]) -> None:
        """Have Redis keep chunks that were found, whichever tier they came from; soon, and not too often."""
        with self._changed:
            if self._remote is None or self._closed or len(self._uses) >= self._capacity:
                return
            now = self._clock()
            due = [link for link in links if now - self._sent.get(link.digest, float("-inf")) >= USE_EVERY_S]
            for link in due:
                self._sent[link.digest] = now
                self._sent.move_to_end(link.digest)
            while len(self._sent) > MOST_USED:
                self._sent.popitem(last=False)
            if due:
                self._uses.append(_Touch(tuple(due), encodings, counts))
                self._start()

    def settle(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or being written; False when that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._uses and not self._busy, timeout_s)

    def close(self, grace_s: float = 1.0) -> None:
        """Take no more offers, write what is queued within the grace, and drop the rest."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.settle(grace_s)
        with self._changed:
            dropped = list(self._jobs)
            self._jobs.clear()
            self._uses.clear()
            self._changed.notify_all()
        for job in dropped:
            job.counts.drop("closed")
            _finish(job.offer)
        if self._thread is not None:
            self._thread.join(grace_s)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._work, name="kv-write", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._jobs or self._uses or self._closed)
                if not self._jobs and not self._uses:
                    return
                job = self._jobs.popleft() if self._jobs else self._uses.popleft()
                self._busy = True
            try:
                if isinstance(job, _Job):
                    self._store(job)
                else:
                    self._keep(job)
            except StoreFault as fault:
                job.counts.fault(fault.kind)
            except Exception:
                job.counts.fault("internal")
                log.exception("writing to the prefix store failed")

    def _keep(self, use: _Touch) -> None:
        """Renew the life of chunks in Redis, and their place in the quota index."""
        remote = self._remote
        assert remote is not None
        deadline = self._clock() + remote.timeout_s
        for namespace in dict.fromkeys(link.namespace for link in use.links):
            links = [link for link in use.links if link.namespace == namespace]
            entries = [entry for link in links for entry in use.encodings.entries(link)]
            # the end of a prompt is evicted first
            there = remote.store.touch([key for key, _ in entries[::-1]], remote.ttl_ms, deadline)[::-1]
            used = [(key, size if is_there else 0) for (key, size), is_there in zip(entries, there, strict=True)]
            remote.quotas.record(namespace, [], used, deadline)  # the index forgets unused keys

    def _store(self, job: _Job) -> None:
        """Read the chunk, and put it where it belongs."""
        offer = job.offer
        try:
            kv = offer.read() if self._may_write(offer.tenant) else None
        finally:
            _finish(offer)  # the engine's blocks are free whatever Redis does
        if kv is None:
            job.counts.drop("quota")
        else:
            self._memory.put(offer.link, kv, before=offer.before)
        remote = self._remote
        if remote is None:
            return
        deadline = self._clock() + remote.timeout_s
        try:
            if kv is not None:
                self._to_redis(remote, job, kv, deadline)
        except StoreFault as fault:
            job.counts.fault(fault.kind)
            job.counts.drop("unreachable" if fault.kind in ("unreachable", "open") else "fault")
        finally:
            remote.locks.ended(offer.link.digest, deadline)

    def _to_redis(self, remote: RemoteTier, job: _Job, kv: torch.Tensor, deadline: float) -> None:
        """Write the chunk in every encoding, if it may be written."""
        offer, encodings, counts = job.offer, job.encodings, job.counts
        namespace = offer.link.namespace
        if remote.store.health() == "off":
            counts.drop("unreachable")
            return
        size = sum(encoding.most_bytes for encoding in encodings.all)
        if not remote.quotas.may_write(namespace, size):
            counts.drop("quota")
            return
        remote.locks.ahead(offer.link.digest, deadline)
        written: list[tuple[bytes, int]] = []
        for encoding in encodings.all:
            try:
                written += self._write_encoding(remote, job, encoding, kv, deadline)
            except ValueError as error:
                counts.fault("codec")
                log.warning("prefix store: codec %s refused a chunk: %s", encoding.codec.name, error)
        if written:
            ancestors = [link for link in offer.before if link.namespace == namespace]
            used = [(key, 0) for link in ancestors for key, _ in encodings.entries(link)]
            try:
                remote.quotas.record(namespace, written, used, deadline)
            except StoreFault as fault:  # the values are there; the index lacks them until they are used, or expire
                counts.fault(fault.kind)

    def _write_encoding(
        self, remote: RemoteTier, job: _Job, encoding: Encoding, kv: torch.Tensor, deadline: float
    ) -> list[tuple[bytes, int]]:
        """Write the values that are not there yet; their keys and sizes."""
        link = job.offer.link
        keys = job.encodings.keys(link, encoding)
        there = remote.store.count_prefix(keys, deadline)
        ttl_ms = max(remote.ttl_ms - DEPTH_TTL_MS * min(link.index, MOST_DEPTH), 1)
        written = []
        for group in range(there, len(keys)):
            value = job.encodings.close(link, encoding, group, kv, self._buffer(job.encodings.buffers.num_bytes))
            if remote.store.write(keys[group], [value], ttl_ms, deadline):
                written.append((keys[group], len(value)))
                job.counts.wrote(job.offer.tenant, len(value))
        return written

    def _buffer(self, size: int) -> bytearray:
        if size not in self._buffers:  # one size for each model
            self._buffers[size] = bytearray(size)
        return self._buffers[size]


def _finish(offer: Offer) -> None:
    try:
        offer.done()
    except Exception:
        log.exception("an offer to the prefix store could not be ended")
