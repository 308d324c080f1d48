"""What a request feels of others: measured on the demo pair, and shown during the goals."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest

from benchmarks.latency_jitter import Smoothness, known_prefix, measure, page
from decoding.sequence import Sequence
from engine.model import EngineModel
from experiments.stats.intervals import spread
from pool.local_pool import LocalPool
from turnout.config import TurnoutConfig

PREFIX = 300


@pytest.fixture
async def pool() -> AsyncIterator[LocalPool]:
    loaded = LocalPool.load("demo", TurnoutConfig.demo())
    yield loaded
    await loaded.close()


@pytest.mark.drivers
async def test_it_is_measured_and_leaves_nothing(pool: LocalPool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CROWD": 20, "PREFIX": PREFIX, "ANSWER": 16, "LONG_PROMPT": 800}.items():
        monkeypatch.setattr(f"benchmarks.latency_jitter.{name}", value)
    felt = await measure(pool, rounds=1)
    assert felt.step_s.value > 0.0
    assert felt.largest_gap.value >= felt.typical_gap.value > 0.0
    assert felt.undisturbed_gap.value >= 1.0
    assert felt.during_crowd.value > 0.0
    assert felt.known_prefix.value > 0.0
    assert pool.stats().sequences == 0

    asked: list[Sequence] = []
    model = pool.engines[pool.roles["large"]]
    release = EngineModel.release

    def recorded(self: EngineModel, seq: Sequence) -> None:
        asked.append(seq)
        release(self, seq)

    monkeypatch.setattr(EngineModel, "release", recorded)
    await known_prefix(model, random.Random(1))
    first, second = (sum(each.cached_tokens for each in seq.meter.models.values()) for seq in asked)
    assert first == 0
    assert PREFIX - model.block_size < second <= PREFIX


def test_the_page_shows_medians_and_spread_beside_the_goals() -> None:
    one = spread([1.0])
    felt = Smoothness(spread([0.010, 0.011, 0.012]), spread([1.9, 2.0, 2.4]), one, one, spread([1.8]), spread([0.04]))
    text = page({"35 M": felt, "220 M": felt}, rounds=3).markdown()
    assert "|  | at most | 35 M | 220 M |" in text
    assert "ms |  | 11.000 [10.000, 12.000] | 11.000" in text
    assert "in such gaps | 2.5 | 2.000 [1.900, 2.400] | 2.000" in text
    assert "| 2 | 1.800 [1.800, 1.800] |" in text
