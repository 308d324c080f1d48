"""Cost-quality curves: quality at equal cost, cost at equal quality, and the area under them, with intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from decoding.calibration import isotonic
from experiments.stats.intervals import Floats, Interval, resampled

ROUNDS = 1000


@dataclass(frozen=True, slots=True)
class Curve:
    """Settings of one way of answering, all on the same prompts.

    Between two settings the curve is a straight line: what one gets by using each of both for a part of the prompts.
    Quality is first made non-decreasing in cost (pooled adjacent violators), so that a lucky setting promises nothing.

    Attributes:
        costs: [settings, prompts], any unit that adds up.
        qualities: [settings, prompts].
    """

    costs: Floats
    qualities: Floats

    def __post_init__(self) -> None:
        if self.costs.shape != self.qualities.shape or self.costs.ndim != 2 or not self.costs.size:
            raise ValueError("costs and qualities must be [settings, prompts], alike")

    @property
    def num_prompts(self) -> int:
        """Columns."""
        return int(self.costs.shape[1])

    def points(self, rows: npt.NDArray[np.int64] | None = None, below: float = math.inf) -> tuple[Floats, Floats]:
        """Mean cost and quality of each setting, by cost.

        Args:
            rows: over the prompts of these numbers; None: over all.
            below: settings that cost as much or more are left out, before quality is made non-decreasing.
        """
        chosen = slice(None) if rows is None else rows
        cost, quality = self.costs[:, chosen].mean(axis=1), self.qualities[:, chosen].mean(axis=1)
        order = np.argsort(cost, kind="stable")
        order = order[cost[order] < below]
        return cost[order], np.array(isotonic(quality[order].tolist()))

    def quality_at(self, cost: float, seed: int = 0) -> Interval:
        """Quality that a mean cost buys; NaN where the curve does not reach so far down."""
        return resampled(lambda rows: _quality_at(*self.points(rows), cost), self.num_prompts, seed, ROUNDS)

    def cost_at(self, quality: Floats, seed: int = 0) -> Interval:
        """Least mean cost of the mean quality that something else has on the same prompts; infinite: none reaches it.

        Args:
            quality: [prompts] the other's.
            seed: of the resampling.
        """

        def cost(rows: npt.NDArray[np.int64]) -> float:
            return least_cost(*self.points(rows), float(quality[rows].mean()))

        return resampled(cost, self.num_prompts, seed, ROUNDS)

    def recovered(self, weak: tuple[Floats, Floats], strong: tuple[Floats, Floats], seed: int = 0) -> Interval:
        """Mean part of the gap between two ends that is recovered, over all costs between theirs: 0.5 is a coin's.

        As APGR (RouteLLM), with cost in the place of calls.

        Args:
            weak: costs and qualities of the cheap end, [prompts] each.
            strong: of the dear end, likewise.
            seed: of the resampling.
        """

        def area(rows: npt.NDArray[np.int64]) -> float:
            (low, worst), (high, best) = ((float(c[rows].mean()), float(q[rows].mean())) for c, q in (weak, strong))
            if high <= low or best <= worst:
                return float("nan")
            costs, qualities = self.points(rows, below=high)
            inside = costs > low
            begin = max([worst, *qualities[costs <= low]])  # a setting may cost less than the cheap end and be better
            x = np.concatenate([[low], costs[inside], [high]])
            y = np.concatenate([[begin], qualities[inside], [best]])
            return float(np.trapezoid((y - worst) / (best - worst), (x - low) / (high - low)))

        return resampled(area, self.num_prompts, seed, ROUNDS)


def _quality_at(costs: Floats, qualities: Floats, cost: float) -> float:
    if cost < costs[0]:
        return float("nan")
    return float(np.interp(cost, costs, qualities))


def least_cost(costs: Floats, qualities: Floats, quality: float) -> float:
    """Least mean cost of a quality, of a curve's points as `Curve.points` gives them; infinite: none reaches it."""
    at = int(np.searchsorted(qualities, quality, side="left"))
    if at == len(qualities):
        return float("inf")
    if at == 0 or qualities[at] == qualities[at - 1]:
        return float(costs[at])
    part = (quality - qualities[at - 1]) / (qualities[at] - qualities[at - 1])
    return float(costs[at - 1] + part * (costs[at] - costs[at - 1]))
