"""Samples that adaptive best-of-k needs for what uniform best-of-k achieves (paper #45)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from experiments.stats.curves import Curve, least_cost
from experiments.stats.intervals import Floats, Interval, resampled
from training.router_samples import allocated

ROUNDS = 1000
ROUNDING = 1e-9  # equal means are not equal to the last bit
ADAPTIVE = ("predicted", "bins", "oracle")
SERVED = ("predicted", "bins")


@dataclass(frozen=True, slots=True)
class Needed:
    """Adaptive best-of-k compared with one budget of uniform best-of-k.

    Attributes:
        k: samples that every request gets there.
        by_one: share of requests answered by their first sample.
        answered: share of requests of which one sample is right, or the one that is shown.
        parts: by way of sharing out samples, those needed for as many answers, as a part of k; NaN where no budget
            answers that many.
        shown: the same where the answer counts that the method `best_of` shows; None where that is not known. Without
            an oracle: the number of right answers does not say which prompt a further sample helps.
    """

    k: int
    by_one: float
    answered: Interval
    parts: dict[str, Interval]
    shown: Needed | None = None

    @property
    def gains(self) -> bool:
        """Whether more samples than one answer anything more; otherwise one each is as good, however shared out."""
        return self.answered.value > self.by_one + ROUNDING


def needed(table: Floats, predicted: Floats, shown: Floats | None = None) -> list[Needed]:
    """For each k from 2 on. Between two budgets the curve of a way is a straight line, and it never falls.

    Args:
        table: [n, most]; see `training.router_samples.answered_by`.
        predicted: [n] chances of a right sample.
        shown: [n, most]; see `training.router_samples.shown_by`. The samples are shared out in the same way.

    Returns:
        Intervals are over prompts drawn again, the samples that each would get staying what they are.
    """
    budgets = [allocated(table, predicted, average) for average in range(1, table.shape[1] + 1)]
    found = _compared(table, budgets, ADAPTIVE)
    if shown is None:
        return found
    return [replace(each, shown=own) for each, own in zip(found, _compared(shown, budgets, SERVED), strict=True)]


def _compared(table: Floats, budgets: list[dict[str, list[int]]], ways: tuple[str, ...]) -> list[Needed]:
    """What these ways of sharing out need, by budget of each way."""
    count, most = table.shape
    curves = {}
    for way in ways:
        given = np.array([budget[way] for budget in budgets])
        curves[way] = Curve(given.astype(np.float64), table[np.arange(count), given - 1])

    def part(way: str, k: int) -> Interval:
        def of(rows: np.ndarray) -> float:
            return least_cost(*curves[way].points(rows), float(table[rows, k - 1].mean()) - ROUNDING) / k

        return resampled(of, count, 0, ROUNDS)

    return [
        Needed(
            k,
            float(table[:, 0].mean()),
            resampled(lambda rows, k=k: float(table[rows, k - 1].mean()), count, 0, ROUNDS),  # type: ignore[misc]
            {way: part(way, k) for way in ways},
        )
        for k in range(2, most + 1)
    ]
