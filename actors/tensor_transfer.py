"""The tensors of an actor for its calls: from its own store, and from other actors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Mapping

import torch

from actors.tensor_store import Key, TensorStore
from actors.transport import GroupBroken, Transport
from turnout.errors import TurnoutError

RECEIVE_S = 60.0  # how long a tensor of another actor may be on its way

Received = dict[Key, torch.Tensor]


class Tensors(Mapping[Key, torch.Tensor]):
    """What handles in a call stand for: tensors of the actor's own store, and those that came for the call.

    Args:
        store: the actor's.
        received: what came.
    """

    def __init__(self, store: TensorStore, received: dict[Key, torch.Tensor]) -> None:
        self._store = store
        self._received = received

    def __getitem__(self, key: Key) -> torch.Tensor:
        return self._received[key] if key in self._received else self._store.find(key)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._received)

    def __len__(self) -> int:
        return len(self._received)


class TensorEndpoint:
    """Where tensors leave and come, in the order in which the coordinator says so.

    Args:
        store: of this actor.
        transport: of this actor.
    """

    def __init__(self, store: TensorStore, transport: Transport) -> None:
        self._store = store
        self._transport = transport

    def ship(self, ids: list[int], to: int, ticket: int) -> None:
        """Send tensors of the store.

        Args:
            ids: on the store.
            to: rank of the actor that waits for them.
            ticket: names the transfer; the group's generation stands in the bits above the lowest 32.
        """
        if ticket >> 32 != self._transport.generation:
            return  # the receiver finds the same
        try:
            tensors = [self._store.find(self._store.key(number)) for number in ids]
        except TurnoutError:
            self._transport.refuse(to, ticket)
        else:
            self._transport.ship(tensors, to, ticket)

    def receive(
        self, source: int, ticket: int, metas: list[tuple[Key, tuple[int, ...], torch.dtype]]
    ) -> asyncio.Future[Received]:
        """Tensors that another actor ships; takes its place in the order when it is called.

        Args:
            source: rank of the sender.
            ticket: names the transfer.
            metas: key, shape and dtype of each tensor.

        Raises:
            GroupBroken: the sender is gone, or sends in another generation of the group.
            Interrupted: it has them no longer.
        """
        coming: Awaitable[list[torch.Tensor]] | None = None
        if ticket >> 32 == self._transport.generation:
            wanted = [(shape, dtype) for _, shape, dtype in metas]
            coming = self._transport.receive(wanted, source, ticket, RECEIVE_S)

        async def receive() -> Received:
            if coming is None:
                raise GroupBroken(f"tensors of actor {source} were sent in another generation of the group")
            return {key: each for (key, _, _), each in zip(metas, await coming, strict=True)}

        task = asyncio.ensure_future(receive())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    def tensors(self, received: Received) -> Tensors:
        """What the handles in a call stand for."""
        return Tensors(self._store, received)
