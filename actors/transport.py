"""Tensors from actor to actor: a torch.distributed group of a replica's actors, next to their calls over Ray.

The group is no default group (tensor parallelism has that one). Its members meet in a store that one of them opens,
for one generation; when a member is replaced, all meet again in another store, and the old connections are closed.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import TCPStore

from actors.flat_buffer import Meta
from actors.group_epoch import GroupBroken, GroupEpoch, Outcome, Traffic
from actors.links import GlooLink, Link, NcclLink
from actors.rendezvous import Meeting, open_store, reach_store
from turnout.errors import Code, TurnoutError

T = TypeVar("T")

__all__ = ["GroupBroken", "Transport"]

GRACE_S = 2.0  # for threads to notice that they are to end


class Transport:
    """One actor's part in its replica's group. All calls come from one event loop; the work is done on threads.

    Tensors arrive dense, on `device`; what is sent from elsewhere goes there first.

    Args:
        device: where this actor's model lives. NCCL connects the members where each has a GPU of its own, gloo where
            not; then what lies on a GPU goes through the CPU.
        address: IP address of this node that the other actors reach.

    Attributes:
        traffic: what was transferred, over all generations.
    """

    def __init__(self, device: torch.device, address: str = "127.0.0.1") -> None:
        self.traffic = Traffic()
        self._device = device
        self._address = address
        self._store: TCPStore | None = None
        self._current: GroupEpoch | None = None
        self._joining: int | None = None
        self._absent: str | None = "this actor has not joined a group yet"

    @property
    def generation(self) -> int | None:
        """Number of the generation this actor is in; None: it is in none."""
        return self._current.number if self._current is not None else None

    @property
    def broken(self) -> str | None:
        """Why transfers fail; None: they do not."""
        return self._current.broken if self._current is not None else self._absent

    def listen(self) -> tuple[str, int]:
        """Open a store for the next generation to meet in.

        Returns:
            Its address and port, for every member's `join`.
        """
        self._store = open_store(self._address)
        return self._address, self._store.port

    async def join(
        self,
        generation: int,
        rank: int,
        world: int,
        address: str,
        port: int,
        timeout_s: float,
        names: Sequence[str] = (),
    ) -> None:
        """Leave the group this actor is in, and form its next generation with all others.

        Args:
            generation: the group's number, larger than those before.
            rank: of this actor.
            world: members.
            address: of the store; its member has called `listen`.
            port: of the store.
            timeout_s: until all are connected.
            names: of the members, by rank, for messages; see `Meeting`.

        Raises:
            TurnoutError: UNAVAILABLE, naming the ranks that did not come.
        """
        await self.leave()
        self._joining, self._absent = generation, f"group {generation} is being formed"

        def meet() -> GroupEpoch:
            return self._meet(generation, rank, world, address, port, timeout_s, names)

        meeting = _started(meet)
        arriving = asyncio.wrap_future(meeting)
        arriving.add_done_callback(_look)
        try:
            made = await asyncio.wait_for(asyncio.shield(arriving), timeout_s + GRACE_S)
            if self._joining != generation:
                raise TurnoutError(Code.UNAVAILABLE, f"group {generation} was left while it was formed")
            self._current = made
        except BaseException as error:
            _started(lambda: _close_late(meeting))
            message = error.message if isinstance(error, TurnoutError) else f"group {generation}: joining was given up"
            if isinstance(error, TimeoutError):
                message = f"group {generation}: rank {rank} could not join it in {timeout_s:.0f} s"
            if self._joining == generation:
                self._joining, self._absent = None, message
            if isinstance(error, TimeoutError):
                raise TurnoutError(Code.UNAVAILABLE, f"{message}; one of its members does not answer") from None
            raise

    def ship(self, tensors: list[torch.Tensor], to: int, ticket: int) -> None:
        """Send tensors to a member; returns at once.

        What is asked of a pair of members, in both directions, must be asked of both in the same order. The tensors
        must not change any more; on a GPU, what computes them must have ended. A failure breaks the group.

        Args:
            tensors: at least one.
            to: rank of the receiver.
            ticket: names the transfer; the receiver gives the same.
        """
        if self._current is not None:
            self._current.ship(tensors, to, ticket)

    def refuse(self, to: int, ticket: int) -> None:
        """Instead of `ship`, where what was to be sent is gone: the receiver gets Interrupted. Keeps the order."""
        if self._current is not None:
            self._current.refuse(to, ticket)

    def receive(self, metas: list[Meta], source: int, ticket: int, timeout_s: float) -> Awaitable[list[torch.Tensor]]:
        """Tensors that a member ships. Takes its place in the order when it is called, not when it is awaited.

        Who stops waiting leaves the transfer to its end.

        Args:
            metas: shape and dtype of each.
            source: rank of the sender.
            ticket: names the transfer.
            timeout_s: until they are here; then the group is broken.

        Raises:
            GroupBroken: the sender is gone or did not send in time, or the group was broken before.
            Interrupted: the sender has them no longer.
        """
        if self._current is None:
            return _refused(self._absent or "this actor is in no group")
        arrival = _Arrival(self._current, source, timeout_s)
        self._current.receive(metas, source, ticket, timeout_s, arrival.tell)
        return arrival.future

    async def leave(self) -> None:
        """Close the connections of the generation this actor is in; what is under way fails."""
        current, self._current, self._joining = self._current, None, None
        self._absent = "this actor has left its group"
        if current is not None:
            current.fail("it was closed")
            await asyncio.wrap_future(_started(lambda: current.close(GRACE_S)))

    async def close(self) -> None:
        """Leave, and close the store."""
        await self.leave()
        self._store = None

    def _meet(
        self,
        generation: int,
        rank: int,
        world: int,
        address: str,
        port: int,
        timeout_s: float,
        names: Sequence[str],
    ) -> GroupEpoch:
        mine = self._store is not None and (address, port) == (self._address, self._store.port)
        store = self._store if mine else reach_store(address, port, generation, timeout_s)
        assert store is not None
        meeting = Meeting(store, generation, rank, world, timeout_s, names)
        reported = meeting.reach("present", json.dumps([f"{self._address}, pid {os.getpid()}", gpu_of(self._device)]))
        members, gpus = zip(*map(json.loads, reported), strict=True)
        try:
            link = self._linked(meeting, between_gpus(gpus))
        except RuntimeError as error:
            raise TurnoutError(
                Code.UNAVAILABLE,
                f"group {generation}: rank {rank} could not connect to all of {'; '.join(members)}: "
                f"{str(error).splitlines()[0]}; check that the nodes reach each other on all ports",
            ) from None
        meeting.reach("connected", "")
        return GroupEpoch(generation, rank, members, link, self._device, self.traffic)

    def _linked(self, meeting: Meeting, between_gpus: bool) -> Link:
        if between_gpus:
            return NcclLink(meeting.store, meeting.rank, meeting.world, self._device)
        return GlooLink(meeting.store, meeting.rank, meeting.world, self._address, meeting.left_s)


def gpu_of(device: torch.device) -> str:
    """Names the GPU among all machines'; empty: it is none, or NCCL is not there."""
    if device.type != "cuda" or not torch.distributed.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def between_gpus(gpus: Sequence[str]) -> bool:
    """Whether NCCL can connect the members: it takes no two on one GPU.

    Args:
        gpus: of all members, see `gpu_of`.
    """
    return all(gpus) and len(set(gpus)) == len(gpus)


def _started(work: Callable[[], T]) -> Future[T]:
    """Run on a daemon thread of its own."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="transport-group", daemon=True).start()
    return future


def _close_late(meeting: Future[GroupEpoch]) -> None:
    """Close a generation that came too late."""
    with suppress(Exception):  # the meeting failed
        late = meeting.result()
        late.fail("its caller no longer waited for it")
        late.close(GRACE_S)


class _Arrival:
    """Wait of the event loop for tensors; cancelling it does not cancel the transfer.

    Args:
        generation: brings them.
        source: sends them.
        timeout_s: until they are here; the generation has a deadline of its own, unless their turn does not come.
    """

    def __init__(self, generation: GroupEpoch, source: int, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[list[torch.Tensor]] = self._loop.create_future()
        self.future.add_done_callback(_look)
        self._generation = generation
        self._late = f"what {generation.name(source)} was to send did not come in {timeout_s:.1f} s"
        self._timer = self._loop.call_later(timeout_s + GRACE_S, self._expire)

    def tell(self, outcome: Outcome) -> None:
        """They are here, or will not come; called by any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._settle, outcome)

    def _settle(self, outcome: Outcome) -> None:
        self._timer.cancel()
        if self.future.done():
            return
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)

    def _expire(self) -> None:
        self._generation.fail(self._late)
        self._settle(GroupBroken(self._generation.broken or self._late))


def _refused(reason: str) -> asyncio.Future[list[torch.Tensor]]:
    future: asyncio.Future[list[torch.Tensor]] = asyncio.get_running_loop().create_future()
    future.set_exception(GroupBroken(reason))
    _look(future)
    return future


def _look(done: asyncio.Future[Any]) -> None:
    """Retrieve the exception, so that asyncio does not log it as unretrieved."""
    if not done.cancelled():
        done.exception()
