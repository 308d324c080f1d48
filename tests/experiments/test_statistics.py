"""Intervals: hand-computed values and coverage."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.stats.intervals import Interval, bootstrap_mean, median_interval, spread, wilson


def test_wilson_matches_a_published_example() -> None:
    # 15 of 20: Wilson 95% interval (0.531, 0.888), Newcombe 1998's formula worked by hand.
    interval = wilson(15, 20)
    assert interval.value == 0.75
    assert interval.low == pytest.approx(0.5313, abs=2e-4)
    assert interval.high == pytest.approx(0.8881, abs=2e-4)


def test_wilson_stays_inside_zero_and_one() -> None:
    assert 0.0 <= wilson(0, 7).low < 1e-12
    assert 1.0 - 1e-12 < wilson(7, 7).high <= 1.0
    with pytest.raises(ValueError, match="at least one"):
        wilson(0, 0)


def test_bootstrap_interval_covers_the_true_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for trial in range(200):
        sample = rng.exponential(1.0, size=60)
        interval = bootstrap_mean(sample, seed=trial, rounds=500)
        covered += interval.low <= 1.0 <= interval.high
    assert 0.87 <= covered / 200 <= 0.99


@pytest.mark.parametrize(("count", "low", "high"), [(5, 1, 5), (6, 1, 6), (9, 2, 8), (12, 3, 10), (40, 14, 27)])
def test_the_interval_of_a_median_lies_between_the_ranks_of_the_table(count: int, low: int, high: int) -> None:
    # The ranks of the sign test at 5%, as tables of the binomial law have them.
    interval = median_interval([float(value) for value in range(count, 0, -1)])
    assert interval == Interval((count + 1) / 2, low, high)


def test_the_interval_of_a_median_covers_it_however_heavy_the_tails() -> None:
    rng = np.random.default_rng(6)
    intervals = [median_interval(list(rng.standard_cauchy(20))) for _ in range(1000)]
    assert 0.94 <= np.mean([each.low <= 0.0 <= each.high for each in intervals]) <= 0.98


def test_spread_is_median_and_extremes() -> None:
    interval = spread([3.0, 1.0, 2.0])
    assert (interval.value, interval.low, interval.high) == (2.0, 1.0, 3.0)
