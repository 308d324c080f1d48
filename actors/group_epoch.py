"""One generation of a group of actors: its members, the order of their transfers, and what broke it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from actors.flat_buffer import Meta, pack, parcel_bytes, unpack
from actors.links import Link
from turnout.errors import Interrupted

if TYPE_CHECKING:
    from turnout.moved_calls import Moved

log = logging.getLogger(__name__)


SEND_TIMEOUT_S = 60.0  # until the receiver has asked for what is sent to it

Outcome = list[torch.Tensor] | Exception


class GroupBroken(Interrupted):
    """A transfer failed because the group is of no use any more; it works again in the group's next generation."""

    def __reduce__(self) -> tuple[type[Interrupted], tuple[str, Moved | None]]:
        return GroupBroken, (self.message, self.moved)


class Status(IntEnum):
    """What follows a header."""

    SENT = 0
    REFUSED = 1


@dataclass(slots=True)
class Traffic:
    """What was transferred so far: bytes, numbers of transfers, and seconds until what was sent had been taken."""

    bytes_sent: int = 0
    bytes_received: int = 0
    sent: int = 0
    received: int = 0
    seconds: float = 0.0


class _Worker:
    """A thread that runs jobs in order. It is a daemon: one that hangs in a transfer does not hold up the exit.

    An executor's threads are joined at exit, however long they hang.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], None]) -> None:
        """Run a job after those before it; it raises nothing."""
        self._jobs.put(job)

    def end(self) -> None:
        """Stop after the jobs before; do not wait."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Return whether the thread ends in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # what it holds does not wait for the next one


class GroupEpoch:
    """Transfers between the members of one generation, each pair's in the order in which they are asked for.

    A header goes before each: int64 [generation, ticket, status, bytes]. So a transfer that does not belong to the
    other side's call breaks the group, and is never taken for another. Any failure breaks the whole group at once:
    all calls from then on fail with what happened first.

    Args:
        number: of the generation.
        rank: of this member.
        members: a name for each, for messages.
        link: connects them.
        device: where tensors are wanted.
        traffic: counted here.
    """

    def __init__(
        self, number: int, rank: int, members: Sequence[str], link: Link, device: torch.device, traffic: Traffic
    ) -> None:
        self.number = number
        self.rank = rank
        self.broken: str | None = None
        self._members = members
        self._link = link
        self._device = device
        self._traffic = traffic
        self._workers: dict[tuple[int, str], _Worker] = {}
        self._ending: _Worker | None = None
        self._counting = threading.Lock()

    def ship(self, tensors: list[torch.Tensor], to: int, ticket: int) -> None:
        """Send tensors, after what was asked for before."""
        self._put(to, "out", lambda: self._send(tensors, Status.SENT, to, ticket))

    def refuse(self, to: int, ticket: int) -> None:
        """Tell the receiver that what it waits for is not there."""
        self._put(to, "out", lambda: self._send([], Status.REFUSED, to, ticket))

    def receive(
        self, metas: list[Meta], source: int, ticket: int, timeout_s: float, tell: Callable[[Outcome], None]
    ) -> None:
        """Take tensors, after what was asked for before; `tell` is called on another thread."""
        deadline = time.monotonic() + timeout_s

        def take() -> None:
            try:
                outcome: Outcome = self._receive(metas, source, ticket, deadline)
            except Exception as error:
                outcome = error
            tell(outcome)

        self._put(source, "in", take)

    def fail(self, message: str) -> None:
        """The group is of no use any more; what waits fails soon. Called from any thread, returns at once."""
        with self._counting:
            if self.broken is not None:
                return
            self.broken = f"group {self.number}: {message}"
            self._ending = _Worker("transport-end")
        self._ending.put(self._link.abort)
        self._ending.end()

    def close(self, timeout_s: float) -> None:
        """End threads and connections; a thread that does not come back in time is left to itself."""
        self.fail("it was closed")
        for worker in self._workers.values():
            worker.end()
        workers = [*self._workers.values(), *([self._ending] if self._ending is not None else [])]
        deadline = time.monotonic() + timeout_s
        left = [worker for worker in workers if not worker.join(max(deadline - time.monotonic(), 0.0))]
        if left:
            log.warning("group %d: %d threads did not end in %.1f s", self.number, len(left), timeout_s)

    def _put(self, other: int, way: str, job: Callable[[], None]) -> None:
        key = (other, "both" if self._link.is_two_way else way)
        worker = self._workers.get(key)
        if worker is None:
            worker = self._workers[key] = _Worker(f"transport-{key[1]}-{other}")
        worker.put(job)

    def _send(self, tensors: list[torch.Tensor], status: Status, to: int, ticket: int) -> None:
        if self.broken is not None:
            return
        try:
            parcel = pack(tensors, self._link.device)
            header = torch.tensor([self.number, ticket, status, len(parcel)], device=self._link.device)
            start = time.monotonic()
            self._link.send(header, parcel, to, ticket, SEND_TIMEOUT_S)
            self._count(sent=len(parcel), seconds=time.monotonic() - start)
        except Exception as error:
            log.debug("group %d", self.number, exc_info=True)
            self.fail(f"rank {self.rank} could not send to {self.name(to)}: {_reason(error)}")

    def _receive(self, metas: list[Meta], source: int, ticket: int, deadline: float) -> list[torch.Tensor]:
        self._check()
        size, device = parcel_bytes(metas), self._link.device
        header = torch.zeros(4, dtype=torch.int64, device=device)
        parcel = torch.empty(size, dtype=torch.uint8, device=device)

        def check() -> None:
            number, came, status, nbytes = header.tolist()
            if status == Status.REFUSED and (number, came) == (self.number, ticket):
                raise Interrupted(
                    f"{self.name(source)} has no longer what was asked of it; the call must be made again"
                )
            if (number, came, nbytes) != (self.number, ticket, size):
                raise RuntimeError(f"expected {size} bytes of transfer {ticket}, came {nbytes} bytes of {came}")

        try:
            self._link.receive(header, parcel, check, source, ticket, _left(deadline))
        except Interrupted:
            raise
        except Exception as error:
            log.debug("group %d", self.number, exc_info=True)
            self.fail(f"rank {self.rank} waited for {self.name(source)} in vain: {_reason(error)}")
            self._check()
            raise
        self._count(received=size)
        return unpack(parcel.to(self._device), metas)

    def _check(self) -> None:
        if self.broken is not None:
            raise GroupBroken(self.broken)

    def name(self, rank: int) -> str:
        """A member, for a message."""
        return f"rank {rank} ({self._members[rank]})"

    def _count(self, sent: int | None = None, received: int | None = None, seconds: float = 0.0) -> None:
        with self._counting:
            self._traffic.seconds += seconds
            if sent is not None:
                self._traffic.bytes_sent += sent
                self._traffic.sent += 1
            if received is not None:
                self._traffic.bytes_received += received
                self._traffic.received += 1


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise RuntimeError("the deadline had passed before its turn came")
    return left


def _reason(error: Exception) -> str:
    """The first line of what torch says, without where in its sources."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].rpartition("] ")[2] or lines[0]
