"""Power: the difference that a number of prompts can detect, before and after they are answered."""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import norm

from experiments.stats.intervals import Floats

ALPHA = 0.05
POWER = 0.8
# Of differences that are not known yet: a fifth of all answers right here and wrong there.
UNSEEN_SPREAD = math.sqrt(0.2)


def _sum_of_quantiles(alpha: float, power: float) -> float:
    return float(norm.ppf(1 - alpha / 2) + norm.ppf(power))


def detectable(prompts: int, spread: float, alpha: float = ALPHA, power: float = POWER) -> float:
    """Smallest mean difference that is found with the wanted power, in the unit of the spread.

    Args:
        prompts: n, at least 1.
        spread: standard deviation of the paired differences.
        alpha: level of the two-sided test; divide it by the number of comparisons for Holm's first step.
        power: chance of finding it.
    """
    return _sum_of_quantiles(alpha, power) * spread / math.sqrt(prompts)


def detectable_between(one: Floats, other: Floats, alpha: float = ALPHA, power: float = POWER) -> float | None:
    """Smallest difference of the means of two groups that is found with the wanted power, given how they vary.

    Args:
        one: [n].
        other: [m].
        alpha: level of the two-sided test; divide it by the number of comparisons for Holm's first step.
        power: chance of finding it.

    Returns:
        In the unit of the values; None where that is not known: of a group of one, or where nothing varies.
    """
    if min(len(one), len(other)) < 2 or max(np.ptp(one), np.ptp(other)) == 0.0:
        return None
    error = math.sqrt(sum(float(np.var(each, ddof=1)) / len(each) for each in (one, other)))
    return _sum_of_quantiles(alpha, power) * error


def prompts_needed(difference: float, spread: float, alpha: float = ALPHA, power: float = POWER) -> int:
    """Prompts with which a mean difference is found with the wanted power.

    Args:
        difference: above 0, in the unit of the spread.
        spread: standard deviation of the paired differences.
        alpha: level of the two-sided test.
        power: chance of finding it.
    """
    return max(1, math.ceil((_sum_of_quantiles(alpha, power) * spread / difference) ** 2))


def statement_of_nats(prompts: int, spread: float, comparisons: int = 1) -> str:
    """The same of log-likelihoods, which have no bounds and so no points."""
    apart = detectable(prompts, spread, ALPHA / max(comparisons, 1))
    return f"{prompts} prompts tell {apart:.3g} nats a token apart (power {POWER:.0%}, {comparisons} comparisons)"


def statement(prompts: int, spread: float, comparisons: int = 1) -> str:
    """One sentence for a report; scores from 0 to 1, differences in points of 0.01."""
    points = detectable(prompts, spread, ALPHA / max(comparisons, 1)) * 100
    needed = prompts_needed(0.02, spread, ALPHA / max(comparisons, 1))
    return (
        f"{prompts} prompts tell {points:.1f} points apart (power {POWER:.0%}, {comparisons} comparisons);"
        f" 2 points would take {needed}"
    )
