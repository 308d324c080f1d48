"""Bootstrap intervals of means, of paired differences, and of whatever is computed from a table of prompts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.stats import bootstrap

from experiments.statistics import Interval, wilson

Floats = npt.NDArray[np.float64]

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

    Where all differ alike, or none does, the interval is what so many prompts leave open (rule of three), not a point.

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
    rng = np.random.default_rng(seed)
    drawn = np.array([statistic(rng.integers(0, count, count)) for _ in range(rounds)])
    return _percentiles(statistic(np.arange(count)), drawn)


def ratio(above: Floats, below: Floats, seed: int = 0, rounds: int = ROUNDS) -> Interval:
    """Sum of one over sum of another, over the same prompts.

    Args:
        above: [n].
        below: [n]; a sum of zero gives NaN.
        seed: of the resampling.
        rounds: resamples.
    """

    rng, count = np.random.default_rng(seed), len(above)
    value = float(above.sum() / below.sum()) if below.sum() else float("nan")
    drawn, at_a_time = [], max(1, AT_A_TIME // count)
    for start in range(0, rounds, at_a_time):
        rows = rng.integers(0, count, (min(at_a_time, rounds - start), count))
        totals = below[rows].sum(axis=1)
        drawn.append(np.divide(above[rows].sum(axis=1), totals, out=np.full_like(totals, np.nan), where=totals != 0))
    return _percentiles(value, np.concatenate(drawn))


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
