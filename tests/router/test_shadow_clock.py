"""The clock of a shadow: what it waits for others is no time of its drafters."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from decoding.fakes import TableModel, markov, pair
from decoding.model import Request
from decoding.sequence import Sequence
from router import shadows
from router.shadows import Gate, deferring
from turnout.registry import get_method
from turnout.types import SamplingParams

VOCAB = 6
BUSY_S = 5.0


class Time:
    """Goes on when told to.

    Attributes:
        now: seconds.
    """

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    """Time of the clocks that wait at gates."""
    found = Time()
    monkeypatch.setattr(shadows, "perf_counter", found)
    return found


async def turns() -> None:
    """Whoever can go on does."""
    for _ in range(10):
        await asyncio.sleep(0)


def models() -> Any:
    """Two that agree often."""
    near = torch.eye(VOCAB).roll(1, 1) + 0.05
    return pair(*(TableModel(name, markov(near), VOCAB) for name in ("small", "large")))


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("pearl", {}),
        ("speculative", {"drafter": {"name": "model_chain"}, "length": "fixed"}),
        ("speculative", {"drafter": ["copyspec", "model_chain"], "length": "fixed", "select": "ucb"}),
    ],
)
async def test_a_round_takes_no_longer_because_others_were_served(
    time: Time, method: str, params: dict[str, Any]
) -> None:
    gate = Gate(most=0)
    seq = Sequence([1, 2], SamplingParams(max_tokens=12), seed=0)
    pool = deferring(models(), gate)

    async def shadow() -> None:
        chosen = get_method(method)
        async for _ in chosen.run(Request("r", seq), pool, chosen.parse(params, "params")):
            pass

    gate.enter()
    task = asyncio.create_task(shadow())
    waits = 0
    while not task.done():
        await turns()
        time.now += BUSY_S
        waits += 1
        gate.leave()
        await asyncio.sleep(0)
        gate.enter()
    await task
    speculation = seq.meter.speculation
    assert waits > 4
    assert speculation.rounds > 1
    assert (speculation.draft_s, speculation.verify_s) == (0.0, 0.0)


async def test_the_clock_stands_still_once_for_two_that_wait(time: Time) -> None:
    gate = Gate(most=0)
    pool = deferring(models(), gate)
    seqs = [Sequence([1], SamplingParams(max_tokens=4), seed=0) for _ in range(2)]
    began = pool.clock()
    time.now += 1.0
    assert pool.clock() - began == pytest.approx(1.0)
    gate.enter()
    first = asyncio.create_task(pool.large.extend(seqs[0]))
    await turns()
    time.now += 2.0
    second = asyncio.create_task(pool.large.extend(seqs[1]))
    await turns()
    time.now += 3.0
    assert pool.clock() - began == pytest.approx(1.0)
    second.cancel()
    await turns()
    time.now += 4.0
    gate.leave()
    await first
    time.now += 0.5
    assert pool.clock() - began == pytest.approx(1.5)
