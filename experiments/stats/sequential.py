"""Looking at results as they come without paying for it: a confidence sequence of a bounded mean.

The predictable plug-in empirical Bernstein sequence of Waudby-Smith and Ramdas ("Estimating means of bounded random
variables by betting", JRSS B 2024, theorem 2): with probability 1 - alpha the mean is inside the interval at every
time at once, so that one may look after each prompt and stop whenever one likes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from experiments.stats.intervals import Interval

MOST_BET = 0.5

Verdict = Literal["better", "worse", "no worse", "undecided"]


@dataclass(slots=True)
class ConfidenceSequence:
    """The mean of values that come one by one and lie between two bounds.

    Args:
        low: no value is below.
        high: no value is above.
        alpha: chance that the mean is ever outside.
    """

    low: float
    high: float
    alpha: float = 0.05
    count: int = 0
    _sum: float = 0.0
    _squares: float = 0.0
    _weights: float = 0.0
    _weighted: float = 0.0
    _penalty: float = 0.0
    _inside: tuple[float, float] = field(default=(0.0, 1.0))

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"low must be below high, got {self.low:g} and {self.high:g}")

    def add(self, values: Iterable[float]) -> Interval:
        """Take more values; the interval that now holds the mean.

        Raises:
            ValueError: a value is out of bounds: nothing would hold.
        """
        for value in values:
            if not self.low <= value <= self.high:
                raise ValueError(f"values must be within {self.low:g} and {self.high:g}, got {value:g}")
            self._one((value - self.low) / (self.high - self.low))
        return self.interval

    def _one(self, x: float) -> None:
        mean_before = (0.5 + self._sum) / (self.count + 1)
        variance_before = (0.25 + self._squares) / (self.count + 1)
        self.count += 1
        t = self.count
        bet = min(math.sqrt(2 * math.log(2 / self.alpha) / (variance_before * t * math.log(1 + t))), MOST_BET)
        self._sum += x
        self._squares += (x - (0.5 + self._sum) / (t + 1)) ** 2
        self._weights += bet
        self._weighted += bet * x
        self._penalty += 4 * (x - mean_before) ** 2 * (-math.log(1 - bet) - bet) / 4
        centre = self._weighted / self._weights
        half = (math.log(2 / self.alpha) + self._penalty) / self._weights
        low, high = self._inside
        self._inside = (max(low, centre - half), min(high, centre + half))

    @property
    def interval(self) -> Interval:
        """Where the mean is; the estimate is the plain mean."""
        span = self.high - self.low
        low, high = (self.low + span * end for end in self._inside)
        mean = self.low + span * (self._sum / self.count if self.count else 0.5)
        return Interval(mean, low, high)


def verdict(interval: Interval, margin: float = 0.0) -> Verdict:
    """What an interval of a difference says; higher is better, a loss below `margin` does not matter."""
    if interval.low > 0:
        return "better"
    if interval.high < -margin or (margin == 0.0 and interval.high < 0):
        return "worse"
    if margin > 0 and interval.low > -margin:
        return "no worse"
    return "undecided"
