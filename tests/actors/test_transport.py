"""Tensors between members of a group: what was sent arrives, in its order, or an error names the member."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.flat_buffer import meta_of
from actors.tensor_store import TensorStore
from actors.tensor_transfer import TensorEndpoint
from actors.transport import GroupBroken, Transport, between_gpus, gpu_of
from tests.actors.hosts import poll
from tests.actors.test_pickling import DTYPES, LAYOUTS, same
from turnout.errors import Interrupted

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
SOON_S = 10.0


async def form(transports: list[Transport], generation: int = 1, timeout_s: float = 20.0) -> None:
    address, port = transports[0].listen()
    world = len(transports)
    joins = [t.join(generation, rank, world, address, port, timeout_s) for rank, t in enumerate(transports)]
    await asyncio.gather(*joins)


@pytest.fixture
async def trio() -> AsyncIterator[list[Transport]]:
    transports = [Transport(CPU) for _ in range(3)]
    await form(transports)
    yield transports
    await asyncio.gather(*(t.close() for t in transports))


class Child:
    """`transport_process` as rank 1 of 2."""

    def __init__(self, port: int, generation: int = 1) -> None:
        arguments = [sys.executable, "-m", "tests.actors.transport_process", str(generation), "1", "2", str(port)]
        self.process = subprocess.Popen(
            arguments, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.end()


async def pair_with(children: list[Child], generation: int = 1, transport: Transport | None = None) -> Transport:
    transport = transport or Transport(CPU)
    address, port = transport.listen()
    children.append(Child(port, generation=generation))
    await transport.join(generation, 0, 2, address, port, 60.0)
    return transport


@pytest.mark.parametrize(
    ("gpus", "nccl"),
    [(("a", "b", "c"), True), (("a", "a"), False), (("a", "", "b"), False), (("", ""), False)],
    ids=["a GPU each", "two on one GPU", "one on a CPU", "all on CPUs"],
)
def test_nccl_connects_members_that_each_have_a_gpu(gpus: tuple[str, ...], nccl: bool) -> None:
    assert between_gpus(gpus) is nccl
    assert gpu_of(CPU) == ""


async def test_every_dtype_and_layout_arrives_as_it_was_sent(trio: list[Transport]) -> None:
    tensors = [torch.tensor([0, 1, 2, 3, 1]).to(dtype) for dtype in DTYPES] + list(LAYOUTS.values())
    trio[0].ship(tensors, 1, 5)
    arrived = await trio[1].receive([meta_of(t) for t in tensors], 0, 5, SOON_S)
    assert len(arrived) == len(tensors)
    assert all(same(mine, theirs) for mine, theirs in zip(tensors, arrived, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_tensor_alone_arrives_as_it_was_sent(trio: list[Transport], layout: str) -> None:
    trio[2].ship([LAYOUTS[layout]], 0, 1)
    [arrived] = await trio[0].receive([meta_of(LAYOUTS[layout])], 2, 1, SOON_S)
    assert same(LAYOUTS[layout], arrived)


async def test_large_tensors_arrive_and_are_counted(trio: list[Transport]) -> None:
    tensors = [torch.rand(1 << 20), torch.rand(3, 1 << 18).to(torch.bfloat16)]
    trio[0].ship(tensors, 1, 1)
    arrived = await trio[1].receive([meta_of(t) for t in tensors], 0, 1, SOON_S)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(tensors, arrived, strict=True))
    total = sum(t.nbytes for t in tensors)
    assert (trio[1].traffic.received, trio[1].traffic.bytes_received) == (1, total)
    await poll(lambda: trio[0].traffic.sent == 1, "the sender counts too")  # on a thread of its own, once it is sent
    assert trio[0].traffic.bytes_sent == total


async def test_transfers_of_a_pair_keep_their_order_and_pairs_do_not_wait_for_each_other(
    trio: list[Transport],
) -> None:
    ways = [(0, 1), (1, 0), (0, 2), (2, 1)]
    expected: dict[tuple[int, int, int], Any] = {}
    waiting = {}
    for ticket in range(40):
        for source, to in ways:
            tensor = torch.full((1 + ticket * 37,), 1000.0 * source + ticket)
            trio[source].ship([tensor], to, ticket)
            expected[source, to, ticket] = tensor
            waiting[source, to, ticket] = trio[to].receive([meta_of(tensor)], source, ticket, SOON_S)
    for key, arrival in waiting.items():
        [arrived] = await arrival
        assert torch.equal(arrived, expected[key])


async def test_who_stops_waiting_leaves_the_order_as_it_is(trio: list[Transport]) -> None:
    one, other = torch.ones(100), torch.zeros(50)
    first = asyncio.ensure_future(trio[1].receive([meta_of(one)], 0, 1, SOON_S))
    second = trio[1].receive([meta_of(other)], 0, 2, SOON_S)
    await asyncio.sleep(0)
    first.cancel()
    trio[0].ship([one], 1, 1)
    trio[0].ship([other], 1, 2)
    [arrived] = await second
    assert torch.equal(arrived, other)
    assert trio[1].broken is None


async def test_a_refusal_interrupts_the_receiver_and_nobody_else(trio: list[Transport]) -> None:
    tensor = torch.ones(10)
    trio[0].refuse(1, 1)
    trio[0].ship([tensor], 1, 2)
    first = trio[1].receive([meta_of(tensor)], 0, 1, SOON_S)
    second = trio[1].receive([meta_of(tensor)], 0, 2, SOON_S)
    with pytest.raises(Interrupted, match="has no longer") as caught:
        await first
    assert not isinstance(caught.value, GroupBroken)
    [arrived] = await second
    assert torch.equal(arrived, tensor)
    assert trio[1].broken is None


async def test_bytes_of_another_size_break_the_group_and_are_never_taken(trio: list[Transport]) -> None:
    trio[0].ship([torch.ones(10)], 1, 1)
    with pytest.raises(GroupBroken, match="expected 44 bytes of transfer 1, came 40 bytes of 1"):
        await trio[1].receive([((11,), torch.float32)], 0, 1, SOON_S)
    assert trio[1].broken is not None


async def test_another_transfer_in_its_place_is_never_taken(trio: list[Transport]) -> None:
    trio[0].ship([torch.ones(10)], 1, 1)
    with pytest.raises(GroupBroken, match=r"rank 0 \(127.0.0.1, pid \d+\)"):
        await trio[1].receive([((10,), torch.float32)], 0, 2, 0.5)


async def test_equal_tags_do_not_make_equal_tickets(trio: list[Transport]) -> None:
    """Headers of tickets 2^30 apart have one tag: what they say tells them apart."""
    trio[0].ship([torch.ones(10)], 1, 2**30 + 7)
    with pytest.raises(GroupBroken, match="of transfer 7"):
        await trio[1].receive([((10,), torch.float32)], 0, 7, SOON_S)


async def test_what_is_not_sent_in_time_breaks_the_group_and_names_the_member(trio: list[Transport]) -> None:
    begun = time.monotonic()
    with pytest.raises(GroupBroken, match=r"waited for rank 2 \(127.0.0.1, pid \d+\) in vain: Timed out"):
        await trio[1].receive([((10,), torch.float32)], 2, 1, 0.3)
    assert time.monotonic() - begun < 20.0
    with pytest.raises(GroupBroken, match="waited for rank 2"):
        await trio[1].receive([((10,), torch.float32)], 0, 2, 60.0)
    assert trio[1].broken is not None


async def test_who_waits_is_told_when_the_group_is_closed(trio: list[Transport]) -> None:
    waiting = trio[1].receive([((10,), torch.float32)], 0, 1, 60.0)
    begun = time.monotonic()
    await trio[1].leave()
    with pytest.raises(GroupBroken, match="closed"):
        await waiting
    assert time.monotonic() - begun < 20.0
    assert trio[1].broken == "this actor has left its group"


async def test_the_next_generation_works_after_the_last_was_broken(trio: list[Transport]) -> None:
    with pytest.raises(GroupBroken):
        await trio[1].receive([((10,), torch.float32)], 0, 1, 0.2)
    await form(trio, generation=2)
    assert [t.generation for t in trio] == [2, 2, 2]
    assert all(t.broken is None for t in trio)
    tensor = torch.rand(1000)
    trio[0].ship([tensor], 1, 1)
    [arrived] = await trio[1].receive([meta_of(tensor)], 0, 1, SOON_S)
    assert torch.equal(arrived, tensor)


async def test_generations_leave_no_thread_and_no_connection(trio: list[Transport]) -> None:
    async def some() -> None:
        trio[0].ship([torch.ones(9)], 1, 1)
        await trio[1].receive([((9,), torch.float32)], 0, 1, SOON_S)

    def held() -> tuple[int, int, int]:
        gc.collect()
        own = [thread for thread in threading.enumerate() if thread.name.startswith("transport")]
        return len(own), *(len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("fd", "task"))

    await some()
    before = held()

    for generation in range(2, 8):
        await form(trio, generation)
        await some()
    # The last one's threads may be about to end; one for each generation would stay for good.
    with suppress(TimeoutError):
        await poll(lambda: all(now <= then + 2 for now, then in zip(held(), before, strict=True)), "former ones ended")
    threads, files, tasks = held()
    assert threads <= before[0] + 2
    assert files <= before[1] + 2
    assert tasks <= before[2] + 2


async def test_before_a_group_is_joined_nothing_is_received() -> None:
    transport = Transport(CPU)
    transport.ship([torch.ones(1)], 0, 1)
    with pytest.raises(GroupBroken, match="has not joined"):
        await transport.receive([((1,), torch.float32)], 0, 1, SOON_S)
    await transport.close()


async def test_a_member_that_is_killed_is_named_and_its_successor_joins(children: list[Child]) -> None:
    transport = await pair_with(children)
    children[0].tell("ship 0 1 1000")
    [arrived] = await transport.receive([((1000,), torch.float32)], 1, 1, SOON_S)
    assert torch.equal(arrived, torch.full((1000,), 1.0))
    waiting = transport.receive([((1000,), torch.float32)], 1, 2, 60.0)
    begun = time.monotonic()
    children[0].signal(signal.SIGKILL)
    with pytest.raises(GroupBroken, match=rf"rank 1 \(127.0.0.1, pid {children[0].process.pid}\)"):
        await waiting
    assert time.monotonic() - begun < 20.0
    await pair_with(children, 2, transport)
    children[1].tell("ship 0 3 10")
    [arrived] = await transport.receive([((10,), torch.float32)], 1, 3, SOON_S)
    assert torch.equal(arrived, torch.full((10,), 3.0))
    await transport.close()


async def test_a_member_that_stands_still_is_named_by_the_deadline(children: list[Child]) -> None:
    transport = await pair_with(children)
    children[0].signal(signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(GroupBroken, match=rf"pid {children[0].process.pid}\) in vain: Timed out"):
        await transport.receive([((1000,), torch.float32)], 1, 1, 0.5)
    transport.ship([torch.rand(1 << 22)], 1, 1)
    await transport.close()
    assert time.monotonic() - begun < 20.0


async def test_what_was_meant_for_another_generation_is_neither_sent_nor_waited_for(trio: list[Transport]) -> None:
    stores = [TensorStore(owner, 0) for owner in range(2)]
    docks = [TensorEndpoint(store, transport) for store, transport in zip(stores, trio[:2], strict=True)]
    tensor = torch.ones(10)
    key = stores[0].key(stores[0].put(tensor))
    coming = [(key, *meta_of(tensor))]
    docks[0].ship([key.id], 1, 7)  # of generation 0
    begun = time.monotonic()
    with pytest.raises(GroupBroken, match="another generation"):
        await docks[1].receive(0, 7, coming)
    assert time.monotonic() - begun < 20.0
    assert trio[1].broken is None
    ticket = (1 << 32) + 8
    docks[0].ship([key.id], 1, ticket)
    assert torch.equal((await docks[1].receive(0, ticket, coming))[key], tensor)
