"""What a hop between actors costs: tensors over the transport and inline, and one operation of a remote model.

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
import uvloop

from actors.pickling import Handles, dumps, loads
from actors.transport import Transport
from benchmarks.harness import note, publish
from benchmarks.hop.operations import Operation, Spoken, measure_operations
from experiments.machine import describe, one_line
from experiments.own_ray import ray_of_its_own
from experiments.statistics import Interval, spread

SIZES = (4 << 10, 1 << 20, 16 << 20)
BATCH = 8  # transfers in one timing
WAIT_S = 60.0
RESULT = Path("docs/results/hop.md")


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


def to_markdown(
    machine: dict[str, str],
    rounds: int,
    setup: Interval,
    transfers: list[Transfer],
    operations: list[Operation],
    spoken: list[Spoken],
) -> str:
    """The result page."""
    lines = [
        "# Hops between actors",
        "",
        f"`python -m benchmarks.bench_hop`; {one_line(machine)}; torch {torch.__version__}, Ray {ray.__version__},"
        f" gloo over the loopback; medians of {rounds} timings [smallest, largest].",
        "",
        *busy_note(machine),
        f"Forming a group of two: {_ms(setup)} ms.",
        "",
        "## Tensors from actor to actor",
        "",
        "| size | transport, ms one way | GB/s | pickled into a Ray call, ms | GB/s | times faster |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for each in transfers:
        mine, theirs = each.rates
        lines.append(
            f"| {each.nbytes >> 10} KiB | {_ms(each.transport_s)} | {mine:.2f} | {_ms(each.inline_s)} | {theirs:.2f} |"
            f" {mine / theirs:.1f} |"
        )
    lines += [
        "",
        "## One operation of a remote model",
        "",
        "Milliseconds per operation. Coordinator: its event loop's CPU time, what Ray's client does in it apart. Model:"
        " the operation itself, waiting for its batch included. Actor: the rest of the actor's time. On the way: all"
        " other, in Ray's processes and the kernel.",
        "",
        "| operation | all | coordinator | Ray's client | on the way | actor | model | bytes there | bytes back |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for op in operations:
        parts = (op.total_s, op.coordinator_s, op.client_s, op.transit_s, op.actor_s, op.model_s)
        times = " | ".join(f"{1000 * part:.3f}" for part in parts)
        lines.append(f"| {op.name} | {times} | {op.bytes_there:.0f} | {op.bytes_back:.0f} |")
    lines += [
        "",
        "## Bytes by method",
        "",
        "Between the coordinator and both actors, and tensors from actor to actor, per token of the answer.",
        "",
        "| method | tokens | messages per token | bytes there | bytes back | actor to actor |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {each.method} | {each.tokens} | {each.messages:.2f} | {each.bytes_there:.0f} | {each.bytes_back:.0f} |"
        f" {each.bytes_between:.0f} |"
        for each in spoken
    ]
    return "\n".join([*lines, ""])


def busy_note(machine: dict[str, str]) -> list[str]:
    """A warning where other work ran beside this."""
    if float(machine["load average at start"]) <= int(machine["cores"]):
        return []
    return ["The machine was busy with other work: times say at most how they compare; bytes and counts stand.", ""]


def _ms(interval: Interval) -> str:
    return f"{1000 * interval.value:.3f} [{1000 * interval.low:.3f}, {1000 * interval.high:.3f}]"


def main(rounds: int, count: int, out: Path | None) -> None:
    """Measure, print, and save where there is a place for it."""
    machine = describe()
    with ray_of_its_own():
        setup, transfers = uvloop.run(measure_transfers(rounds))
        operations, spoken = uvloop.run(measure_operations(count))
    text = to_markdown(machine, rounds, setup, transfers, operations, spoken)
    parts = {
        "machine": machine,
        "rounds": rounds,
        "setup_s": asdict(setup),
        "transfers": [asdict(each) for each in transfers],
        "operations": [asdict(each) for each in operations],
        "methods": [asdict(each) for each in spoken],
    }
    publish(text, out, parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="timings of each transfer")
    parser.add_argument("--count", type=int, default=100, help="operations of each kind")
    parser.add_argument("--quick", action="store_true", help="two rounds, ten operations; printed and not saved")
    parser.add_argument("--out", type=Path, help=f"absent: {RESULT}, nowhere with --quick")
    chosen = parser.parse_args()
    if chosen.quick:
        main(2, 10, chosen.out)
    else:
        main(chosen.rounds, chosen.count, chosen.out or RESULT)
