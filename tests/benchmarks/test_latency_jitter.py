"""What a request feels of others: measured on the demo pair, and shown during the goals."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from benchmarks.latency_jitter import Smoothness, measure, page
from experiments.stats.intervals import spread
from pool.local_pool import LocalPool
from turnout.config import TurnoutConfig


@pytest.fixture
async def pool() -> AsyncIterator[LocalPool]:
    loaded = LocalPool.load("demo", TurnoutConfig.demo())
    yield loaded
    await loaded.close()


async def test_it_is_measured_and_leaves_nothing(pool: LocalPool) -> None:
    felt = await measure(pool, rounds=3)
    assert 0.0 < felt.step_s.value < 1.0
    assert felt.largest_gap.value > felt.typical_gap.value > 0.0
    assert felt.undisturbed_gap.value > 1.0
    assert felt.during_crowd.value > 0.0
    assert 0.0 < felt.known_prefix.low < 0.5
    assert pool.stats().sequences == 0


def test_the_page_shows_medians_and_spread_beside_the_goals() -> None:
    one = spread([1.0])
    felt = Smoothness(spread([0.010, 0.011, 0.012]), spread([1.9, 2.0, 2.4]), one, one, spread([1.8]), spread([0.04]))
    text = page({"35 M": felt, "220 M": felt}, rounds=3).markdown()
    assert "|  | at most | 35 M | 220 M |" in text
    assert "ms |  | 11.000 [10.000, 12.000] | 11.000" in text
    assert "in such gaps | 2.5 | 2.000 [1.900, 2.400] | 2.000" in text
    assert "| 2 | 1.800 [1.800, 1.800] |" in text
