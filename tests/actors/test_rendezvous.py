"""A group is formed, or an error says who is missing or what does not answer."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch

from actors.rendezvous import Meeting, reach_store
from actors.transport import GroupBroken, Transport
from turnout.errors import Code, TurnoutError

CPU = torch.device("cpu")
SOON_S = 10.0


async def test_who_never_joins_is_named_by_everybody() -> None:
    transports = [Transport(CPU) for _ in range(4)]
    address, port = transports[0].listen()
    begun = time.monotonic()
    joins = [transports[rank].join(4, rank, 5, address, port, 3.0) for rank in (0, 1, 3)]
    outcomes = await asyncio.gather(*joins, return_exceptions=True)
    assert time.monotonic() - begun < 30.0
    for outcome in outcomes:
        assert isinstance(outcome, TurnoutError)
        assert outcome.code is Code.UNAVAILABLE
        assert "group 4 of 5 members: ranks 2, 4 did not come to the step 'present'" in outcome.message
    with pytest.raises(GroupBroken, match="ranks 2, 4"):
        await transports[0].receive([((1,), torch.float32)], 1, 1, SOON_S)
    await asyncio.gather(*(t.close() for t in transports))


async def test_a_meeting_place_that_is_not_there_is_named() -> None:
    transport = Transport(CPU)
    other = Transport(CPU)
    address, port = other.listen()
    await other.close()
    begun = time.monotonic()
    with pytest.raises(TurnoutError, match=rf"meeting place at {address}:{port} does not answer \(Connection refused"):
        await transport.join(1, 1, 2, address, port, SOON_S)
    assert time.monotonic() - begun < SOON_S / 2, "who refuses is not waited for"


async def test_a_meeting_place_that_takes_nobody_is_named() -> None:
    """Where a firewall drops what is sent, connecting neither succeeds nor fails."""
    with ExitStack() as opened:
        full = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port = full.getsockname()[1]
        with suppress(TimeoutError):
            while True:  # until the queue of the connections that nobody accepts is full
                opened.enter_context(socket.create_connection(("127.0.0.1", port), 0.2))
        transport = Transport(CPU)
        with pytest.raises(TurnoutError, match=rf"meeting place at 127.0.0.1:{port} does not answer \(no answer in 1"):
            await transport.join(1, 1, 2, "127.0.0.1", port, 1.0)


async def test_a_meeting_place_listens_on_its_own_address_only() -> None:
    transport = Transport(CPU)
    address, port = transport.listen()
    socket.create_connection((address, port), SOON_S).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), SOON_S)
    await transport.close()


class LateMeeting:
    """A generation that is there when it is told to be, in place of one that is formed."""

    def __init__(self, transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
        self.come, self.closed = threading.Event(), threading.Event()
        self.number, self.broken = 0, None
        monkeypatch.setattr(transport, "_meet", self._meet)

    def _meet(self, generation: int, *_: Any) -> Any:
        self.number = generation
        assert self.come.wait(SOON_S)
        return self

    def fail(self, reason: str) -> None:
        assert reason

    def close(self, grace_s: float) -> None:
        self.closed.set()


async def test_a_group_that_is_formed_too_late_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.transport.GRACE_S", 0.01)
    transport = Transport(CPU)
    late = LateMeeting(transport, monkeypatch)
    with pytest.raises(TurnoutError, match="group 3: rank 0 could not join it"):
        await transport.join(3, 0, 2, "127.0.0.1", 1, 0.05)
    late.come.set()
    assert await asyncio.to_thread(late.closed.wait, SOON_S)
    assert transport.generation is None
    assert "group 3: rank 0 could not join it" in str(transport.broken)


async def test_a_group_that_was_left_while_it_was_formed_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = Transport(CPU)
    late = LateMeeting(transport, monkeypatch)
    joining = asyncio.create_task(transport.join(3, 0, 2, "127.0.0.1", 1, SOON_S))
    while not late.number:
        await asyncio.sleep(0.001)
    await transport.leave()
    late.come.set()
    with pytest.raises(TurnoutError, match="group 3 was left"):
        await joining
    assert await asyncio.to_thread(late.closed.wait, SOON_S)
    assert transport.generation is None


async def test_a_member_that_dies_while_it_joins_is_named() -> None:
    transport = Transport(CPU)
    address, port = transport.listen()

    def die() -> None:
        Meeting(reach_store(address, port, 1, 5.0), 1, 1, 2, 5.0).reach("present", '["about to die", ""]')

    begun = time.monotonic()
    dying = asyncio.create_task(asyncio.to_thread(die))
    with pytest.raises(TurnoutError, match=r"group 1: rank 0 could not connect to all of .*about to die") as caught:
        await transport.join(1, 0, 2, address, port, 5.0)
    assert caught.value.code is Code.UNAVAILABLE
    assert time.monotonic() - begun < 60.0
    await dying
    await transport.close()
