"""Figures of the page: right and wrong answers, paired differences, and areas under ROC curves."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt

from experiments.stats.intervals import Floats, Interval, bootstrap_mean, resampled
from training.calibration import auc

ROUNDS = 2000
UNKNOWN = Interval(float("nan"), float("nan"), float("nan"))


def written(values: Iterable[float]) -> str:
    """Write numbers as one text, which a JSON file shows on one line."""
    return " ".join(f"{value:.6g}" for value in values)


def numbers(text: str) -> Floats:
    """Read what `written` wrote."""
    return np.array([float(each) for each in text.split()])


def difference(one: Floats, other: Floats) -> Interval:
    """Mean of one less the other over the same prompts, which are drawn together."""
    return bootstrap_mean(one - other, seed=0)


def area(doubts: Floats, wrong: Floats) -> float:
    """Area under the ROC curve of doubts for finding wrong answers; ties count half, NaN without both kinds.

    Args:
        doubts: [n], the greater the more doubt.
        wrong: [n], 1 where the answer is wrong, else 0.
    """
    return auc(doubts, wrong) if 0.0 < wrong.mean() < 1.0 else float("nan")


def area_interval(doubts: Floats, wrong: Floats) -> Interval:
    """`area` with a bootstrap over prompts."""
    return resampled(lambda rows: area(doubts[rows], wrong[rows]), len(wrong), 0, ROUNDS)


def area_difference(doubts: Floats, baseline: Floats, wrong: Floats) -> Interval:
    """Area of one estimator less that of another, over the same prompts, which are drawn together."""

    def less(rows: npt.NDArray[np.int64]) -> float:
        return area(doubts[rows], wrong[rows]) - area(baseline[rows], wrong[rows])

    return resampled(less, len(wrong), 0, ROUNDS)


def at_cost(curve: Items[tuple[float, Floats]], cost: float) -> Floats:
    """Right answers at a cost, prompt by prompt, on the line between the two points of a curve around it.

    Args:
        curve: cost and right answers of each point; a cost beyond the ends is compared with the end.
        cost: where.
    """
    points = sorted(curve, key=lambda point: point[0])
    costs = [point[0] for point in points]
    place = int(np.searchsorted(costs, cost))
    if place in (0, len(points)):
        return points[min(place, len(points) - 1)][1]
    low, high = points[place - 1 : place + 1]
    part = (cost - low[0]) / (high[0] - low[0])
    found: Floats = (1.0 - part) * low[1] + part * high[1]
    return found
