"""The generator against servers that stall, refuse and fall silent, in virtual time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from experiments.load.clients import LoadClient
from experiments.load.generator import CpuWatch, drive
from experiments.load.metrics import percentiles
from experiments.load.records import Record
from experiments.load.schedule import constant
from tests.experiments.fake_server import OneAtATime, Silent
from tests.experiments.virtual_time import VirtualLoop, run

# Half of the server's capacity; request 20, due at 4 s, takes 4.1 s.
ARRIVALS = constant(5.0, 20.0, 0)
STALLED = 20


def records_of(server: LoadClient, arrivals: list[float], prompts: list[str], drain_s: float = 60.0) -> list[Record]:
    async def drive_in_virtual_time() -> list[Record]:
        return await drive(server, arrivals, prompts, drain_s, clock=asyncio.get_running_loop().time)

    return run(drive_in_virtual_time())


def stalling_server() -> OneAtATime:
    return OneAtATime(service_s=0.1, stalled=STALLED, stall_s=4.0)


def test_a_stall_delays_everything_that_was_due_meanwhile() -> None:
    records = records_of(stalling_server(), ARRIVALS, ["p"])
    assert [record.scheduled_s for record in records] == ARRIVALS
    # The stall ends at 8.1; the backlog then leaves every 0.1 s, while a request still comes every 0.2 s.
    expected = [0.1 if i < STALLED else max(0.1, 8.1 + 0.1 * (i - STALLED) - 0.2 * i) for i in range(100)]
    assert [record.ttft_s for record in records] == pytest.approx(expected)
    assert [record.sent_s for record in records] == pytest.approx(ARRIVALS)


def test_a_closed_loop_would_not_have_seen_it() -> None:
    """Coordinated omission, planted: a client that waits for each answer meets the same stall once."""

    async def closed_loop() -> list[float]:
        server, loop = stalling_server(), asyncio.get_running_loop()
        latencies = []
        for _ in ARRIVALS:
            sent = loop.time()
            await server.answer("p", lambda: None)
            latencies.append(loop.time() - sent)
        return latencies

    closed = percentiles(run(closed_loop()))
    opened = percentiles(record.ttft_s for record in records_of(stalling_server(), ARRIVALS, ["p"]))
    assert closed[90] == pytest.approx(0.1)
    assert opened[90] == pytest.approx(3.1)  # request 30: due at 6.0, answered at 9.1
    assert opened[99] == pytest.approx(4.0)


def test_a_client_that_falls_behind_counts_from_the_schedule_too() -> None:
    class BlocksOnce(OneAtATime):
        async def answer(self, prompt: str, output: Callable[[], None]) -> int:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            if loop.now < 1.0:
                loop.now += 3.0
            return await super().answer(prompt, output)

    records = records_of(BlocksOnce(service_s=0.1), [0.0, 1.0, 2.0, 5.0], ["p"])
    assert [record.sent_s for record in records] == pytest.approx([0.0, 3.0, 3.0, 5.0])
    assert [record.ttft_s for record in records] == pytest.approx([3.1, 2.2, 1.3, 0.1])


def test_refusals_and_silence_are_recorded() -> None:
    records = records_of(OneAtATime(service_s=1.0, room=2), [0.0, 0.1, 0.2, 2.5], ["p"])
    assert [record.error for record in records] == [None, None, "RESOURCE_EXHAUSTED", None]
    assert records_of(Silent(), [0.0, 1.0], ["p"], drain_s=5.0) == [
        Record(0.0, 0.0, error="UNFINISHED"),
        Record(1.0, 1.0, error="UNFINISHED"),
    ]
    assert records_of(Silent(), [], ["p"], drain_s=5.0) == []


def test_prompts_are_taken_in_turn() -> None:
    class Remembers(OneAtATime):
        prompts: list[str]

        async def answer(self, prompt: str, output: Callable[[], None]) -> int:
            self.prompts.append(prompt)
            return await super().answer(prompt, output)

    server = Remembers(service_s=0.1)
    server.prompts = []
    records_of(server, [0.0, 0.1, 0.2], ["a", "b"])
    assert server.prompts == ["a", "b", "a"]


def test_a_client_that_computes_is_seen_to() -> None:
    watch, busy_until = CpuWatch(), time.process_time() + 0.2
    while time.process_time() < busy_until:
        pass
    computing = watch.cores()
    rest_until = time.monotonic() + 60
    while watch.cores() >= 0.75 * computing:  # an average since it began to watch
        assert time.monotonic() < rest_until
        time.sleep(0.1)
    assert watch.cores() > 0
