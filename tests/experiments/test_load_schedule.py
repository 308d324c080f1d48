"""Arrival schedules: fixed by their seed, and with the statistics their names promise."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from experiments.load.schedule import BURST, SCHEDULES, at_once, bursts, constant, poisson


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_seed_fixes_a_schedule_which_ascends_and_ends_in_time(name: str) -> None:
    schedule = SCHEDULES[name]
    times = schedule(20.0, 10.0, 3)
    assert times == schedule(20.0, 10.0, 3)
    assert times == sorted(times)
    assert all(0 <= time < 10 for time in times)


def test_poisson_sums_the_seeds_exponential_gaps() -> None:
    source = random.Random(7)
    first, second = source.expovariate(2.0), source.expovariate(2.0)
    assert poisson(2.0, 100.0, 7)[:2] == [first, first + second]
    assert poisson(2.0, 100.0, 8)[:2] != [first, first + second]


def test_poisson_has_the_rate_and_exponential_gaps() -> None:
    times = poisson(50.0, 400.0, 1)
    assert abs(len(times) - 20_000) < 4 * 20_000**0.5  # four standard deviations of a Poisson count
    gaps = [after - before for before, after in pairwise(times)]
    assert stats.kstest(gaps, stats.expon(scale=1 / 50).cdf).pvalue > 0.01
    # Equal gaps have the same mean, and must not pass for a Poisson process.
    assert stats.kstest(np.diff(constant(50.0, 400.0, 1)), stats.expon(scale=1 / 50).cdf).pvalue < 1e-6


def test_constant_is_evenly_spaced() -> None:
    assert constant(4.0, 1.5, 0) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.25]


def test_bursts_come_together_at_the_same_mean_rate() -> None:
    times = bursts(40.0, 400.0, 2)
    assert len(times) % BURST == 0
    assert all(len(set(times[at : at + BURST])) == 1 for at in range(0, len(times), BURST))
    num_bursts = len(times) // BURST
    assert abs(num_bursts - 2000) < 4 * 2000**0.5
    assert len(set(times)) == num_bursts


def test_a_pile_comes_at_once() -> None:
    assert at_once(3.0, 2.0, 0) == [0.0] * 6
