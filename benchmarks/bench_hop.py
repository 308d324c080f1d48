"""Cost of a hop between actors: tensors over the transport and inline, and one operation of a remote model.

First two actors send each other tensors, over their torch.distributed group (half a round trip) and pickled into a Ray
call, which is awaited. Then the demo pair runs in two model actors: the time of one operation is split into what the
coordinator, Ray and the actor take, and methods are run to count the bytes that a token costs. One request at a time,
all processes on one machine.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
import torch

from actors.pickling import Handles, dumps, loads
from actors.transport import Transport
from benchmarks.harness import Report, command_line, note, run, shown
from benchmarks.hop.operations import Operation, Spoken, measure_operations
from experiments.own_ray import ray_of_its_own
from experiments.pairs import open_pair
from experiments.stats.intervals import Interval, spread

SIZES = (4 << 10, 1 << 20, 16 << 20)
BATCH = 8  # transfers in one timing
WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """One way of one tensor, in seconds: median with the smallest and largest of several timings."""

    nbytes: int
    transport_s: Interval
    inline_s: Interval

    @property
    def rates(self) -> tuple[float, float]:
        """GB/s: over the transport, inline."""
        return self.nbytes / self.transport_s.value / 1e9, self.nbytes / self.inline_s.value / 1e9


class Peer:
    """One end of a transfer; a Ray actor."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._transport = Transport(torch.device("cpu"))
        self._ticket = 0

    async def listen(self) -> tuple[str, int]:
        """Where the group meets."""
        return self._transport.listen()

    async def join(self, generation: int, rank: int, address: str, port: int) -> None:
        """Form a group of two."""
        await self._transport.join(generation, rank, 2, address, port, WAIT_S)

    async def bounce(self, other: int, nbytes: int, rounds: int, leads: bool) -> list[float]:
        """Send a tensor there and back; seconds of one way, for each round."""
        meta = ((nbytes // 4,), torch.float32)
        tensors, times = [torch.rand(nbytes // 4)], []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            for _ in range(BATCH):
                self._ticket += 2
                if leads:
                    self._transport.ship(tensors, other, self._ticket)
                arrived = await self._transport.receive([meta], other, self._ticket + leads, WAIT_S)
                if not leads:
                    self._transport.ship(arrived, other, self._ticket + 1)
            times.append((time.perf_counter() - start) / (2 * BATCH))
        return times[1:]

    async def hand(self, other: Any, nbytes: int, rounds: int) -> list[float]:
        """Send a tensor in a call to the other; seconds until the call returns, for each round."""
        tensor, times = torch.rand(nbytes // 4), []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            for _ in range(BATCH):
                await other.take.remote(dumps(tensor, None))
            times.append((time.perf_counter() - start) / BATCH)
        return times[1:]

    async def take(self, blob: bytes) -> None:
        """Unpack what came."""
        loads(blob, Handles())

    async def close(self) -> None:
        """Leave the group."""
        await self._transport.close()


async def measure_transfers(rounds: int) -> tuple[Interval, list[Transfer]]:
    """Seconds to form a group, and the transfers."""
    actor = ray.remote(num_cpus=0)(Peer)
    first, second = actor.remote(), actor.remote()
    setups = []
    for generation in range(rounds + 1):
        address, port = await first.listen.remote()
        start = time.perf_counter()
        await asyncio.gather(
            *(peer.join.remote(generation, rank, address, port) for rank, peer in _ranks(first, second))
        )
        setups.append(time.perf_counter() - start)
    transfers = []
    for nbytes in SIZES:
        note(f"transfers of {nbytes >> 10} KiB")
        times, _ = await asyncio.gather(
            first.bounce.remote(1, nbytes, rounds, True), second.bounce.remote(0, nbytes, rounds, False)
        )
        inline = await first.hand.remote(second, nbytes, rounds)
        transfers.append(Transfer(nbytes, spread(times), spread(inline)))
    await asyncio.gather(first.close.remote(), second.close.remote())
    for peer in (first, second):
        ray.kill(peer)
    return spread(setups[1:]), transfers


def _ranks(*peers: Any) -> list[tuple[int, Any]]:
    return list(enumerate(peers))


def page(
    rounds: int, setup: Interval, transfers: list[Transfer], operations: list[Operation], spoken: list[Spoken]
) -> Report:
    """The result page."""
    report = Report(
        "Hops between actors",
        f"`python -m benchmarks.bench_hop`; torch {torch.__version__}, Ray {ray.__version__}, gloo over the loopback;"
        f" medians of {rounds} timings [smallest, largest].",
    )
    report.text(f"Forming a group of two: {_ms(setup)} ms.")
    report.values["setup_s"] = asdict(setup)
    report.section("Tensors from actor to actor")
    sent = {
        "size": lambda each: f"{each.nbytes >> 10} KiB",
        "transport, ms one way": lambda each: _ms(each.transport_s),
        "transport, GB/s": lambda each: shown(each.rates[0], 2),
        "pickled into a Ray call, ms": lambda each: _ms(each.inline_s),
        "pickled, GB/s": lambda each: shown(each.rates[1], 2),
        "times faster": lambda each: shown(each.rates[0] / each.rates[1], 1),
    }
    report.table("transfers", transfers, sent)
    report.section("One operation of a remote model")
    report.text(
        "Milliseconds per operation. Coordinator: its event loop's CPU time, what Ray's client does in it apart. Model:"
        " the operation itself, waiting for its batch included. Actor: the rest of the actor's time. On the way: all"
        " other, in Ray's processes and the kernel."
    )
    parts = {
        "operation": lambda each: each.name,
        "all": lambda each: shown(each.total_s, 3, 1000),
        "coordinator": lambda each: shown(each.coordinator_s, 3, 1000),
        "Ray's client": lambda each: shown(each.client_s, 3, 1000),
        "on the way": lambda each: shown(each.transit_s, 3, 1000),
        "actor": lambda each: shown(each.actor_s, 3, 1000),
        "model": lambda each: shown(each.model_s, 3, 1000),
        "bytes there": lambda each: shown(each.bytes_there),
        "bytes back": lambda each: shown(each.bytes_back),
    }
    report.table("operations", operations, parts)
    report.section("Bytes by method")
    report.text("Between the coordinator and both actors, and tensors from actor to actor, per token of the answer.")
    by_method = {
        "method": lambda each: each.method,
        "tokens": lambda each: each.tokens,
        "messages per token": lambda each: shown(each.messages, 2),
        "bytes there": lambda each: shown(each.bytes_there),
        "bytes back": lambda each: shown(each.bytes_back),
        "actor to actor": lambda each: shown(each.bytes_between),
    }
    report.table("methods", spoken, by_method)
    return report


def _ms(interval: Interval) -> str:
    return shown(interval, 3, 1000)


async def measure(options: argparse.Namespace) -> Report:
    """Transfers, then operations of a pair."""
    with ray_of_its_own():
        setup, transfers = await measure_transfers(options.rounds)
        operations, spoken = await measure_operations(options.count, open_pair(options.pair))
    return page(options.rounds, setup, transfers, operations, spoken)


if __name__ == "__main__":
    parser = command_line(__doc__, Path("docs/results/hop.md"), rounds=7, takes_pair=True, count=10)
    parser.add_argument("--count", type=int, default=100, help="operations of each kind")
    run(parser, measure)
