"""What a router's artifact promises: for each share of requests that the large model answers, cost, quality, errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

from decoding.artifacts import Artifact
from decoding.calibration import isotonic
from router.difficulty.probe import LEAST_EXTRA
from turnout.errors import invalid, out_of_range

NEVER = 1.0 + 1.0 / LEAST_EXTRA  # gains are differences of chances
ALWAYS = -NEVER


@dataclass(frozen=True, slots=True)
class Point:
    """What held-out prompts showed at one share.

    Attributes:
        share: of requests that the large model answers.
        cost: relative to the large model answering all of them.
        quality: mean reward.
        missed: share of all prompts that only the large model gets right, and the small one answers; None where the
            artifact does not say.
        wasted: share of all prompts that the small model gets right, and the large one answers; None likewise.
    """

    share: float
    cost: float
    quality: float
    missed: float | None = None
    wasted: float | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """Who goes to the large model: whose predicted worth is above `worth`, and of those at it, a part.

    Attributes:
        worth: the threshold.
        of_ties: part of the requests with just this worth, which an isotonic map gives to many; 1.0: all.
    """

    worth: float
    of_ties: float = 1.0


@dataclass(frozen=True, slots=True)
class RouterCurve:
    """Held-out prompts in a router's artifact.

    Quality is first made non-decreasing in the share (pooled adjacent violators), so that a lucky point promises
    nothing.

    Attributes:
        gains: quantiles of the predicted gain, rising, evenly spaced from the least to the largest.
        worths: likewise of the predicted worth, which is the gain for its cost.
        points: by share, from 0 to 1.
        large: quality of the large model on them.
    """

    gains: tuple[float, ...]
    worths: tuple[float, ...]
    points: tuple[Point, ...]
    large: float

    @classmethod
    def of(cls, artifact: Artifact) -> Self:
        """Of an artifact of the kind `router_probe`."""
        routing = artifact.settings["routing"]
        qualities = isotonic([each["quality"] for each in routing["curve"]])
        points = [
            Point(each["share"], each["cost"], quality, *_errors(each, routing))
            for each, quality in zip(routing["curve"], qualities, strict=True)
        ]
        gains, worths = (tuple(artifact.settings["quantiles"][name]) for name in ("gain", "worth"))
        return cls(gains, worths, tuple(points), routing["large_only"]["value"])

    def cut(self, share: float) -> Cut:
        """What decides who goes to the large model, so that `share` of the held-out prompts would."""
        if share <= 0.0:
            return Cut(NEVER)
        if share >= 1.0:
            return Cut(ALWAYS)
        worth = quantile(self.worths, 1.0 - share)
        tied = [place / (len(self.worths) - 1) for place, each in enumerate(self.worths) if each == worth]
        if len(tied) < 2:
            return Cut(worth)
        return Cut(worth, (share - (1.0 - tied[-1])) / (tied[-1] - tied[0]))

    def share_at_cost(self, cost: float, field: str) -> float:
        """The largest share whose cost is within a limit.

        Raises:
            TurnoutError: OUT_OF_RANGE with the reachable range.
        """
        costs = [point.cost for point in self.points]
        if cost < min(costs):
            raise out_of_range(field, f"{cost:g} cannot be reached; reachable: {min(costs):.3f} to {max(costs):.3f}")
        # From the dear end on: where the large model's answers are the cheaper ones, the cost falls with the share.
        for before, after in reversed(list(pairwise(self.points))):
            if after.cost <= cost:
                return after.share
            if before.cost <= cost:
                part = (cost - before.cost) / (after.cost - before.cost)
                return before.share + part * (after.share - before.share)
        return self.points[0].share

    def share_at_quality(self, quality: float, field: str) -> float:
        """The smallest share that keeps so much of the large model's quality.

        Raises:
            TurnoutError: OUT_OF_RANGE with the reachable range.
        """
        wanted = quality * self.large
        if self.points[0].quality >= wanted:
            return 0.0
        for before, after in zip(self.points, self.points[1:], strict=False):
            if after.quality >= wanted:
                part = (wanted - before.quality) / (after.quality - before.quality)
                return before.share + part * (after.share - before.share)
        best = max(point.quality for point in self.points) / self.large if self.large else 0.0
        raise out_of_range(field, f"{quality:g} cannot be reached; reachable: at most {best:.3f}")

    def share_of_least_loss(self, miss_weight: float, field: str) -> float:
        """The share that loses least; of several the smallest.

        A wasted large answer loses 1, a missed prompt the weight. Between two points the loss is a straight line, so
        that no share loses less than the best point's.

        Raises:
            TurnoutError: INVALID_ARGUMENT: the artifact does not say how often either error is made.
        """
        losses = [
            (miss_weight * point.missed + point.wasted, point.share)
            for point in self.points
            if point.missed is not None and point.wasted is not None
        ]
        if not losses:
            raise invalid(
                field,
                "needs error rates, and the artifact has none: train it anew with turnout train router, or set"
                " large_share, cost, quality or threshold instead",
            )
        return min(losses)[1]


def _errors(point: dict[str, Any], routing: dict[str, Any]) -> tuple[float | None, float | None]:
    """Missed and wasted at a point, as shares of all prompts; a rate of nothing is None in the artifact."""
    if "hard" not in routing or "easy" not in routing:
        return None, None
    missed = routing["hard"] * (point["hard_sent_small"] or 0.0)
    return missed, routing["easy"] * (point["easy_sent_large"] or 0.0)


def quantile(values: Sequence[float], part: float) -> float:
    """Of evenly spaced quantiles, the one at `part` from 0 to 1, along straight lines between them."""
    place = part * (len(values) - 1)
    below = min(int(place), len(values) - 2)
    return values[below] + (place - below) * (values[below + 1] - values[below])
