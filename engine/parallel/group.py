"""The processes that hold one model together: how they find each other, and what they do as one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from engine.parallel.connections import BEAT_S, Beats, Link, gone
from engine.parallel.framing import Array, Op, pack, pack_text
from engine.parallel.rendezvous import find_leader, meet
from turnout.errors import Code, Interrupted, TurnoutError

log = logging.getLogger(__name__)

GLOO = "gloo_by_address"


class Group:
    """One rank's side of a group; made by `join`.

    The collective methods are called by all ranks, in the same order.

    Args:
        rank: which this is; 0 leads.
        world: ranks in the group.
        device: where this rank's share lives.
        links: the leader's to every other rank; another rank's to the leader.
        store: where the ranks found each other; lives as long as the group.

    Attributes:
        lost: why the group cannot go on; None while it can.
    """

    def __init__(self, rank: int, world: int, device: torch.device, links: list[Link], store: Store) -> None:
        self.rank = rank
        self.world = world
        self.device = device
        self.links = links
        self.lost: str | None = None
        self._store = store
        self._lock = threading.Lock()
        self._closed = False
        self._ended = threading.Event()
        self._beats = Beats(links[0]) if rank else None

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def tell(self, op: Op, *arrays: Array) -> None:
        """Send a frame to every link."""
        frame = pack(op, arrays)
        for link in self.links:
            link.send(frame)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """What all ranks do at once; one thing at a time, from any thread.

        Whatever fails inside ends the group: the ranks may no longer be at the same place.

        Args:
            what: it is, for messages.

        Raises:
            Interrupted: a rank is lost, named where it is known.
        """
        with self._lock:
            if self.lost is not None:
                raise Interrupted(self.lost)
            try:
                yield
            except Exception as error:
                self._abandon(error, what)
                raise Interrupted(self.lost or "") from error

    @contextmanager
    def leading(self, op: Op, *arrays: Array) -> Iterator[None]:
        """Tell all other ranks to do something, and do the same in the context; see `together`."""
        with self.together(op.name):
            self.tell(op, *arrays)
            yield

    def watch(self) -> None:
        """From now on, the leader takes in signs of life, and sets `lost` between operations where a rank has ended."""
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def _watch(self) -> None:
        while not self._ended.wait(BEAT_S):
            with suppress(Interrupted), self.together("a pause"):
                for link in self.links:
                    said = [frame for frame in link.drain() if frame.op is not Op.BEAT]
                    for frame in said:
                        link.keep(frame)  # why it gives up
                    if said:
                        raise RuntimeError(f"{link} has given up")

    def _abandon(self, error: Exception, what: str) -> None:
        """The group is at its end: note why, and let go of everybody."""
        whom = gone(self.links)
        who = f"the {self.world} processes that a model is split over cannot go on after {what}"
        why = "; ".join(whom) or f"{type(error).__name__}: {error}"
        self.lost = f"{who}: {why}; all of them must be started again"
        log.error("%s", self.lost)
        self._let_go(broken=True)

    def fail(self, reason: str) -> None:
        """Tell the other end why this rank ends, and leave the group."""
        with suppress(Exception):
            self.tell(Op.FAILED, pack_text(reason))
        self.lost = self.lost or reason
        self._let_go(broken=True)

    def close(self) -> None:
        """Leave the group; the leader makes its followers leave too. May be called more than once."""
        with self._lock:
            if self._closed:
                return
            if self.leads and self.lost is None:
                with suppress(Exception):
                    self.tell(Op.END)
            self.lost = self.lost or "the group is closed"
            self._let_go(broken=False)

    def _let_go(self, broken: bool) -> None:
        if self._closed:
            return
        self._closed = True
        self._ended.set()
        if self._beats is not None:
            self._beats.stop()
        for link in self.links:
            link.close()
        # Peers that wait for this rank in a collective are woken by its connections being closed.
        with suppress(Exception):
            if broken and self.device.type == "cuda":
                dist.distributed_c10d._abort_process_group()  # plain destruction would wait for lost peers
            else:
                dist.destroy_process_group()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        dist.all_reduce(tensor)
        return tensor

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, of one shape, on the leader; nothing on the others."""
        parts = [torch.empty_like(tensor) for _ in range(self.world)] if self.leads else None
        dist.gather(tensor, parts, dst=0)
        return parts or []

    def scatter(self, tensor: torch.Tensor, parts: list[torch.Tensor] | None) -> torch.Tensor:
        """Fill `tensor` with this rank's of the leader's parts."""
        dist.scatter(tensor, parts, src=0)
        return tensor


def join(
    rank: int,
    world: int,
    address: str,
    port: int,
    timeout_s: float,
    device: str = "cpu",
    step_timeout_s: float = 60.0,
    listen_fd: int | None = None,
) -> Group:
    """Become one of the processes that hold a model together; blocks until all are there.

    Takes torch.distributed's default group of this process, which must be free. With NCCL a collective that times out
    ends the process, whose supervisor starts the ranks again.

    Args:
        rank: which of them this is, from 0; 0 leads.
        world: how many there are.
        address: where rank 0 can be reached.
        port: a free one there, for the meeting.
        timeout_s: longest time to wait for the others.
        device: where this rank's share of the model will live; one device is visible to a process.
        step_timeout_s: longest time a rank may be behind the others within one operation.
        listen_fd: of rank 0's socket that holds the port, see `engine.parallel.tcp_store.listen`; taken over.

    Raises:
        TurnoutError: UNAVAILABLE, naming the ranks that did not come; INVALID_ARGUMENT: a rank outside the group, or a
            process that is in a group already.
    """
    if not 0 <= rank < world or world < 2:
        raise TurnoutError(Code.INVALID_ARGUMENT, f"rank {rank} of {world}: ranks are 0 to {world - 1}, two at least")
    if dist.is_initialized():
        raise TurnoutError(Code.INVALID_ARGUMENT, "this process is in a torch.distributed group already")
    torch_device = torch.device(device)
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)
    if rank == 0:
        store, links = meet(world, address, port, timeout_s, step_timeout_s, listen_fd)
    else:
        store, links = find_leader(rank, world, address, port, timeout_s, step_timeout_s)
    _use_address(links[0].address)
    # Blocks of keys and values travel by way of the CPU, whatever the layers use.
    backend = f"cuda:nccl,cpu:{GLOO}" if torch_device.type == "cuda" else f"cpu:{GLOO}"
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=step_timeout_s),
        )
    except Exception as error:
        why = "; ".join(gone(links)) or str(error)
        for link in links:
            link.close()
        raise TurnoutError(Code.UNAVAILABLE, f"rank {rank} of {world} could not join its group: {why}") from error
    return Group(rank, world, torch_device, links, store)


def _use_address(address: str) -> None:
    """Have gloo connect by this address of the machine, not by the one that its host name happens to stand for."""

    def make(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # `Options` is that of its base
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timeout
        new: Any = ProcessGroupGloo  # its stub does not know of options
        return new(store, rank, size, options)

    dist.Backend.register_backend(GLOO, make, devices=["cpu"])
