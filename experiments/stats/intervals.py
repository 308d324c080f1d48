"""Intervals: of proportions, medians, means and paired differences, and of any statistic of a table of prompts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from math import comb

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

Z95 = 1.959963984540054
ROUNDS = 2000
LEVEL = 0.95
# Numbers that one step of resampling holds in memory.
AT_A_TIME = 4_000_000
# 1 - 0.95 to the power of 1/n is about 3/n: what is never seen in n trials may still happen so often.
RULE_OF_THREE = 3.0
# Values beyond which the acceleration, whose work grows with their square, is left out: it is next to nothing there.
MANY = 10_000
# Differences of equal differences, as a share of them.
ROUNDING = 1e-12


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
            return f"{_written(self.value)} [unknown]"
        return f"{_written(self.value)} [{_written(self.low)}, {_written(self.high)}]"


def _written(value: float) -> str:
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


def bootstrap_mean(values: Floats, seed: int, rounds: int = 4000) -> Interval:
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


def bca_mean(values: Floats, seed: int = 0, level: float = LEVEL, rounds: int = ROUNDS) -> Interval:
    """Mean with its bias-corrected and accelerated bootstrap interval (Efron 1987); of very many values, percentiles.

    Values that are all equal give an interval without width.

    Args:
        values: [n], n at least 1.
        seed: of the resampling.
        level: coverage aimed at.
        rounds: resamples.

    Raises:
        ValueError: no values.
    """
    from scipy.stats import bootstrap  # an extra, and slow to import

    if not len(values):
        raise ValueError("an interval needs at least one value")
    if np.ptp(values) <= ROUNDING * np.abs(values).max():
        same = float(values[0])
        return Interval(same, same, same)
    found = bootstrap(
        (values,),
        np.mean,
        n_resamples=rounds,
        batch=max(1, AT_A_TIME // len(values)),
        confidence_level=level,
        method="BCa" if len(values) <= MANY else "percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(float(values.mean()), float(found.low), float(found.high))


def paired_difference(challenger: Floats, baseline: Floats, seed: int = 0, level: float = LEVEL) -> Interval:
    """Mean of challenger minus baseline over the same prompts, scores from 0 to 1, with its BCa interval.

    Where all differ alike, or none does, the interval is what so few prompts leave open (rule of three), not a point.

    Args:
        challenger: [n].
        baseline: [n], of the same prompts.
        seed: of the resampling.
        level: coverage aimed at.
    """
    differences = challenger - baseline
    if np.ptp(differences) > 0.0:
        return bca_mean(differences, seed, level)
    same, open_ = float(differences[0]), min(RULE_OF_THREE / len(differences), 1.0)
    return Interval(same, max(same - open_, -1.0), min(same + open_, 1.0))


def unpaired_difference(one: Floats, other: Floats, seed: int = 0, level: float = LEVEL) -> Interval:
    """Mean of one group less that of another, with its BCa interval; of very many values, percentiles.

    Two groups without any spread give an interval without width; of a group of one, no interval is known: its ends
    are NaN.

    Args:
        one: [n], n at least 1.
        other: [m], m at least 1.
        seed: of the resampling.
        level: coverage aimed at.
    """
    from scipy.stats import bootstrap

    value, fewest, together = float(one.mean() - other.mean()), min(len(one), len(other)), len(one) + len(other)
    if max(np.ptp(one), np.ptp(other)) <= ROUNDING * max(np.abs(one).max(), np.abs(other).max()):
        return Interval(value, value, value)
    if fewest < 2:
        return Interval(value, float("nan"), float("nan"))
    found = bootstrap(
        (one, other),
        lambda a, b, axis: np.mean(a, axis=axis) - np.mean(b, axis=axis),
        n_resamples=ROUNDS,
        batch=max(1, AT_A_TIME // together),
        confidence_level=level,
        method="BCa" if together <= MANY else "percentile",
        vectorized=True,
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(value, float(found.low), float(found.high))


def mean_score(scores: Floats) -> Interval:
    """Mean of scores: Wilson's interval where all are right or wrong, which has a width when all are right, else BCa.

    Raises:
        ValueError: no scores.
    """
    if np.all((scores == 0.0) | (scores == 1.0)):
        return wilson(int(scores.sum()), len(scores))
    return bca_mean(scores)


def score_difference(one: Floats, other: Floats) -> Interval:
    """Mean score of one group less that of another: where all are right or wrong Newcombe's interval, else BCa.

    Newcombe's (1998, method 10) is made of Wilson's of either group, and has a width when all are right.

    Args:
        one: [n], n at least 1.
        other: [m], m at least 1.
    """
    if not np.isin(np.concatenate([one, other]), (0.0, 1.0)).all():
        return unpaired_difference(one, other)
    a, b = (wilson(int(each.sum()), len(each)) for each in (one, other))
    below, above = np.hypot(a.value - a.low, b.high - b.value), np.hypot(a.high - a.value, b.value - b.low)
    value = a.value - b.value
    return Interval(value, float(value - below), float(value + above))


def resampled(
    statistic: Callable[[npt.NDArray[np.int64]], float], count: int, seed: int = 0, rounds: int = ROUNDS
) -> Interval:
    """Percentile bootstrap of anything computed from a table of prompts.

    Where more resamples have no value than lie beyond one end, no interval is known: its ends are NaN.

    Args:
        statistic: of prompts by their numbers, which may repeat; NaN where a resample has no value, infinite where
            something is not reached in it.
        count: of prompts.
        seed: of the resampling.
        rounds: resamples.
    """
    [interval] = resampled_values(lambda rows: (statistic(rows),), count, seed, rounds)
    return interval


def resampled_values(
    statistics: Callable[[npt.NDArray[np.int64]], tuple[float, ...]], count: int, seed: int = 0, rounds: int = ROUNDS
) -> list[Interval]:
    """Percentile bootstrap of several statistics of the same resamples; arguments as of `resampled`."""
    rng = np.random.default_rng(seed)
    drawn = np.array([statistics(rng.integers(0, count, count)) for _ in range(rounds)])
    values = statistics(np.arange(count))
    return [_percentiles(value, column) for value, column in zip(values, drawn.T, strict=True)]


def ratio(above: Floats, below: Floats, seed: int = 0, rounds: int = ROUNDS) -> Interval:
    """Sum of one over sum of another, over the same prompts.

    Args:
        above: [n].
        below: [n]; a sum of zero gives NaN.
        seed: of the resampling.
        rounds: resamples.
    """
    return resampled_sums(_quotient, np.stack([above, below], axis=1), seed, rounds)


def _quotient(sums: Floats) -> Floats:
    """[..., 2] -> [...]."""
    above, below = sums[..., 0], sums[..., 1]
    found: Floats = np.divide(above, below, out=np.full_like(below, np.nan), where=below != 0)
    return found


def resampled_sums(
    statistic: Callable[[Floats], Floats], table: Floats, seed: int = 0, rounds: int = ROUNDS
) -> Interval:
    """Percentile bootstrap of what is computed from sums over the rows of a table; see `resampled`.

    Args:
        statistic: [..., columns] -> [...], of sums; NaN where it has no value.
        table: [rows, columns]; the values of a row are drawn together.
        seed: of the resampling.
        rounds: resamples.
    """
    rng, count = np.random.default_rng(seed), len(table)
    drawn, at_a_time = [], max(1, AT_A_TIME // table.size)
    for start in range(0, rounds, at_a_time):
        rows = rng.integers(0, count, (min(at_a_time, rounds - start), count))
        drawn.append(statistic(np.stack([column[rows].sum(axis=1) for column in table.T], axis=-1)))
    return _percentiles(float(statistic(table.sum(axis=0))), np.concatenate(drawn))


def _percentiles(value: float, drawn: Floats) -> Interval:
    known = drawn[~np.isnan(drawn)]
    if len(known) < len(drawn) * (1 + LEVEL) / 2:
        return Interval(value, float("nan"), float("nan"))
    below, above = (1 - LEVEL) / 2, (1 + LEVEL) / 2
    if np.isfinite(known).all():
        low, high = np.quantile(known, [below, above])
    else:  # nothing lies between a number and an infinite one: an end is one of the two
        low, high = np.quantile(known, below, method="lower"), np.quantile(known, above, method="higher")
    return Interval(value, float(low), float(high))
