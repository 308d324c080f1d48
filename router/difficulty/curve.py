"""What a router's artifact promises: for each share of requests that the large model answers, cost and quality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from decoding.artifacts import Artifact
from turnout.errors import out_of_range

NEVER = 2.0  # gains are differences of chances
ALWAYS = -1.0


@dataclass(frozen=True, slots=True)
class Point:
    """What held-out prompts showed at one share; `cost` is relative to the large model answering all of them."""

    share: float
    cost: float
    quality: float


@dataclass(frozen=True, slots=True)
class RouterCurve:
    """Held-out prompts in a router's artifact.

    Attributes:
        gains: quantiles of the predicted gain, rising, evenly spaced from the least to the largest.
        points: by share, from 0 to 1.
        large: quality of the large model on them.
    """

    gains: tuple[float, ...]
    points: tuple[Point, ...]
    large: float

    @classmethod
    def of(cls, artifact: Artifact) -> Self:
        """Of an artifact of the kind `router_probe`."""
        routing = artifact.settings["routing"]
        points = [Point(each["share"], each["cost"], each["quality"]) for each in routing["curve"]]
        gains = tuple(artifact.settings["quantiles"]["gain"])
        return cls(gains, tuple(points), routing["large_only"]["value"])

    def threshold(self, share: float) -> float:
        """The predicted gain from which on a request goes to the large model, so that `share` of them do."""
        if share <= 0.0:
            return NEVER
        if share >= 1.0:
            return ALWAYS
        return quantile(self.gains, 1.0 - share)

    def share_at_cost(self, cost: float, field: str) -> float:
        """The largest share whose cost is within a limit.

        Raises:
            TurnoutError: OUT_OF_RANGE with the reachable range.
        """
        low, high = self.points[0].cost, self.points[-1].cost
        if not low <= cost:
            raise out_of_range(field, f"{cost:g} cannot be reached; reachable: {low:.3f} to {high:.3f}")
        found = 0.0
        for before, after in zip(self.points, self.points[1:], strict=False):
            if after.cost <= cost:
                found = after.share
            elif before.cost <= cost:
                part = (cost - before.cost) / (after.cost - before.cost)
                return before.share + part * (after.share - before.share)
        return found

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


def quantile(values: Sequence[float], part: float) -> float:
    """Of evenly spaced quantiles, the one at `part` from 0 to 1, along straight lines between them."""
    place = part * (len(values) - 1)
    below = min(int(place), len(values) - 2)
    return values[below] + (place - below) * (values[below + 1] - values[below])
