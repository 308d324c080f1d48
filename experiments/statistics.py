"""Intervals for proportions and paired differences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import comb

import numpy as np
import numpy.typing as npt

Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95% interval: NaN where nothing is known of it, infinite where something is not reached."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "-"
        if math.isnan(self.low) and math.isnan(self.high):
            return f"{_told(self.value)} [unknown]"
        return f"{_told(self.value)} [{_told(self.low)}, {_told(self.high)}]"


def _told(value: float) -> str:
    return "not reached" if math.isinf(value) else f"{value:.3f}"


def wilson(successes: int, trials: int) -> Interval:
    """Wilson score interval of a proportion.

    Raises:
        ValueError: no trials.
    """
    if trials < 1:
        raise ValueError("a proportion needs at least one trial")
    p = successes / trials
    scale = 1 + Z95**2 / trials
    centre = (p + Z95**2 / (2 * trials)) / scale
    half = Z95 * float(np.sqrt(p * (1 - p) / trials + Z95**2 / (4 * trials**2))) / scale
    return Interval(p, max(centre - half, 0.0), min(centre + half, 1.0))


def bootstrap_mean(values: npt.NDArray[np.float64], seed: int, rounds: int = 4000) -> Interval:
    """Percentile bootstrap of a mean; pass per-prompt differences for a paired comparison."""
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(values), size=(rounds, len(values)))
    means = values[picks].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(values.mean()), float(low), float(high))


def median_interval(values: list[float]) -> Interval:
    """Median, between the two values that hold it with a chance of at least 95% whatever the law of the values.

    Order statistics: how many of n values lie below the median is binomial. Of fewer than six values none holds it so
    often; the smallest and the largest are given.
    """
    n, ordered = len(values), np.sort(values)
    at_most = np.cumsum([comb(n, below) / 2**n for below in range(n)])  # chances of so few below the median
    place = max(int((at_most <= 0.025).sum()) - 1, 0)
    return Interval(float(np.median(ordered)), float(ordered[place]), float(ordered[n - 1 - place]))


def spread(values: list[float]) -> Interval:
    """Median with the smallest and largest value: for a few repeated timings."""
    return Interval(float(np.median(values)), min(values), max(values))
