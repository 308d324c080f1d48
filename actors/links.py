"""Point-to-point transfers between the members of a group: gloo for CPUs, NCCL for GPUs.

All calls block and are made on threads of the transport's. Both ends of a transfer give the same size: gloo ends the
process where they differ, and NCCL waits for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch
from torch._C._distributed_c10d import Store

POLL_S = 0.0002
NEVER_S = 86400.0
TAGS = 2**30  # of headers, and as many of parcels: gloo takes tags below 2**31
ABORT_TAG = 2**31 - 1


class Link(Protocol):
    """A member's connections to the others. A transfer is a header, whose size is fixed, and a parcel, or none.

    Attributes:
        device: where the bytes lie that it sends and receives.
        is_two_way: whether a pair's transfers in both directions follow one order, the same on both sides.
    """

    device: torch.device
    is_two_way: ClassVar[bool]

    def send(self, header: torch.Tensor, parcel: torch.Tensor, to: int, ticket: int, timeout_s: float) -> None:
        """Send both; returns when they have been taken. An empty parcel is not sent.

        Raises:
            RuntimeError: the other is gone, the deadline passed, or the link was aborted; it is of no use any more.
        """
        ...

    def receive(
        self,
        header: torch.Tensor,
        parcel: torch.Tensor,
        check: Callable[[], None],
        source: int,
        ticket: int,
        timeout_s: float,
    ) -> None:
        """Fill the header, call `check`, then fill the parcel. Raises as `send`, and what `check` raises.

        Args:
            header: to be filled.
            parcel: to be filled; not, where it is empty.
            check: raises where no such parcel follows.
            source: sender.
            ticket: of the transfer.
            timeout_s: for all of it.
        """
        ...

    def abort(self) -> None:
        """Make whatever is under way fail; called from any thread."""
        ...


class GlooLink:
    """Over TCP between CPUs.

    Args:
        store: of this generation.
        rank: of this member.
        world: members.
        address: IP address of this machine that the others reach.
        timeout_s: to connect to all.

    Raises:
        RuntimeError: the connection to a member failed.
    """

    is_two_way: ClassVar[bool] = False

    def __init__(self, store: Store, rank: int, world: int, address: str, timeout_s: float) -> None:
        from torch._C._distributed_c10d import ProcessGroupGloo

        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # `Options` is that of its base
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1  # for collectives, which there are none of
        self.device = torch.device("cpu")
        self._others = [other for other in range(world) if other != rank]
        self._group: Any = ProcessGroupGloo(store, rank, world, options)  # its stub lacks the calls made here

    def send(self, header: torch.Tensor, parcel: torch.Tensor, to: int, ticket: int, timeout_s: float) -> None:
        """Send a transfer. See `Link`."""
        deadline = time.monotonic() + timeout_s
        works = [self._group.send([header], to, _header_tag(ticket))]
        if len(parcel):
            works.append(self._group.send([parcel], to, _parcel_tag(ticket, len(parcel))))
        for work in works:
            _finish(work, deadline)

    def receive(
        self,
        header: torch.Tensor,
        parcel: torch.Tensor,
        check: Callable[[], None],
        source: int,
        ticket: int,
        timeout_s: float,
    ) -> None:
        """Receive a transfer. See `Link`.

        The parcel is asked for at once, which spares a round trip; one of another size never comes in its place.
        """
        deadline = time.monotonic() + timeout_s
        first = self._group.recv([header], source, _header_tag(ticket))
        second = self._group.recv([parcel], source, _parcel_tag(ticket, len(parcel))) if len(parcel) else None
        _finish(first, deadline)
        check()
        if second is not None:
            _finish(second, deadline)

    def abort(self) -> None:
        """End all connections: a wait that times out does that, there is no call for it."""
        with suppress(RuntimeError, IndexError):
            nothing = torch.empty(1, dtype=torch.uint8)
            self._group.recv([nothing], self._others[0], ABORT_TAG).wait(timedelta(milliseconds=1))


class NcclLink:
    """Between GPUs. Deadlines are kept here: NCCL's own end the process.

    Args:
        store: of this generation.
        rank: of this member.
        world: members.
        device: this member's GPU.

    Raises:
        RuntimeError: NCCL is not there.
    """

    is_two_way: ClassVar[bool] = True

    def __init__(self, store: Store, rank: int, world: int, device: torch.device) -> None:
        from torch._C._distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=NEVER_S)
        self.device = device
        self._aborted = threading.Event()
        self._group: Any = ProcessGroupNCCL(store, rank, world, options)

    def send(self, header: torch.Tensor, parcel: torch.Tensor, to: int, ticket: int, timeout_s: float) -> None:
        """Send a transfer. See `Link`."""
        deadline = time.monotonic() + timeout_s
        with torch.cuda.device(self.device):
            for data in (header, parcel):
                if len(data):
                    self._group.send([data], to, 0).wait()
                    self._wait(deadline)

    def receive(
        self,
        header: torch.Tensor,
        parcel: torch.Tensor,
        check: Callable[[], None],
        source: int,
        ticket: int,
        timeout_s: float,
    ) -> None:
        """Receive a transfer. See `Link`."""
        deadline = time.monotonic() + timeout_s
        with torch.cuda.device(self.device):
            self._group.recv([header], source, 0).wait()
            self._wait(deadline)
            check()
            if len(parcel):
                self._group.recv([parcel], source, 0).wait()
                self._wait(deadline)

    def abort(self) -> None:
        """End all connections."""
        self._aborted.set()
        with suppress(RuntimeError):  # it had broken before
            self._group.abort()

    def _wait(self, deadline: float) -> None:
        """Until what this thread asked of the device is done."""
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        while not event.query():
            if self._aborted.is_set():
                break
            if time.monotonic() > deadline:
                raise RuntimeError("timed out")
            time.sleep(POLL_S)
        if self._aborted.is_set():
            raise RuntimeError("the group was ended")


def _header_tag(ticket: int) -> int:
    return 2 * (ticket % TAGS)


def _parcel_tag(ticket: int, nbytes: int) -> int:
    """Never a header's; parcels of one ticket that differ in size have different ones."""
    return 2 * ((ticket * 0x9E3779B1 + nbytes) % TAGS) + 1


def _finish(work: Any, deadline: float) -> None:
    # gloo takes 0 for no deadline.
    if not work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001))):
        raise RuntimeError("the group was ended")
