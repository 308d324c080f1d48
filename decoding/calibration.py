"""Calibration of a method's knob on a pair of models: a measured curve, and the setting that meets a target.

The curve is made by `training.knob_calibration` and kept as an artifact of the kind `calibration`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from pydantic import TypeAdapter, ValidationError

from decoding.artifacts import Artifact
from turnout.errors import invalid, out_of_range

KIND = "calibration"
# Where a method leaves in `Request.extra` the parameters it worked out, for the answer's usage to show.
RAN = "params"


@dataclass(frozen=True, slots=True)
class TunableParam:
    """The parameter of a method that a calibration sets.

    Attributes:
        name: the parameter.
        fixed: parameters that decide what the knob means; a calibration holds for one choice of them.
        never: for a threshold on values that the method sees, a setting at which the small model writes everything;
            the method tells the values to its recorder. None: the knob is a share or a chance.
        falling: whether a larger setting means less of the large model.
    """

    name: str
    fixed: tuple[str, ...]
    never: float | None = None
    falling: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """An estimate with its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of the knob, and what was measured with it.

    Attributes:
        position: of the setting on the knob's way from the small to the large model, from 0 to 1.
        value: the setting.
        large_share: tokens the large model wrote, dropped ones included, per token of the answers.
        paper: parameters charged per token written, relative to the large model alone writing what stayed.
        flops: relative to the large model alone on the same prompts.
        length: tokens of the answers, relative to the large model's own.
        quality: mean over the prompts.
        retained: quality relative to the large model's own.
        seen: of the values the threshold was compared with, how many fell into each bin of `KnobCalibration.edges`.
    """

    position: float
    value: float
    large_share: Span
    paper: Span
    flops: Span
    length: Span
    quality: Span
    retained: Span
    seen: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Basis:
    """Basis of a measurement: its data and sampling.

    Attributes:
        data: digest of the rows.
        source: the file's name, or the kind of the demo's problems.
        rows: how many.
        measure: how quality was measured: exact, numeric, regex, mixed, or agreement with the large model.
        temperature: of the answers; 0 is greedy.
        max_tokens: longest answer.
        seed: of the answers and the intervals.
        large_quality: the large model's own.
    """

    data: str
    source: str
    rows: int
    measure: str
    temperature: float
    max_tokens: int
    seed: int
    large_quality: Span


@dataclass(frozen=True, slots=True)
class KnobCalibration:
    """A measured curve.

    Settings between two points are read along the straight line between them, by position. Share and quality are
    first made non-decreasing in the large model's share (pooled adjacent violators), so that a lucky point promises
    nothing.

    Attributes:
        method: the switching method.
        knob: its parameter.
        fixed: the parameters it was measured with.
        basis: what was measured on.
        grid: (position, setting) pairs, by position: quantiles of the values that the threshold is compared with while
            the small model writes alone, or the ends.
        points: by position.
        chosen: position that meets the target it was made for.
        target: that target.
        edges: inner edges of the bins of `Point.seen`: deciles of these values.
        drift_limit: population stability index beyond which live values have left the calibrated range.
    """

    method: str
    knob: str
    fixed: dict[str, Any]
    basis: Basis
    grid: tuple[tuple[float, float], ...]
    points: tuple[Point, ...]
    chosen: float
    target: dict[str, Any]
    edges: tuple[float, ...] = ()
    drift_limit: float = 0.0
    version: str = field(default="", compare=False)

    @classmethod
    def of(cls, artifact: Artifact, where: str) -> KnobCalibration:
        """Read an artifact.

        Raises:
            TurnoutError: INVALID_ARGUMENT: its settings are not a calibration's.
        """
        try:
            found = _SHAPE.validate_python({**artifact.settings, "version": artifact.version})
        except ValidationError as error:
            place = ".".join(map(str, error.errors(include_url=False)[0]["loc"]))
            raise invalid(where, f"is no calibration that this version can read ({place})") from None
        for name in ("grid", "points"):
            if len(getattr(found, name)) < 2:
                raise invalid(where, f"is no calibration: {name} has no two entries to read a setting between")
        return found

    def to_artifact(self, models: dict[str, str], trainer: str) -> Artifact:
        """As an artifact for the models with these digests."""
        settings = asdict(self)
        del settings["version"]
        return Artifact(KIND, trainer, settings, models, {})

    def setting(self, position: float) -> float:
        """The knob's setting at a position."""
        places, settings = zip(*self.grid, strict=True)
        return along(places, settings, position)

    def position_of(self, where: str, *, large_share: float | None = None, quality: float | None = None) -> float:
        """The least position that meets a target; the one it was made for where none is given.

        Shares are read between the measured points. A quality is promised by a measured one only: it may jump between
        two, where many values of a threshold are alike.

        Args:
            where: name of the field that holds the target, for refusals.
            large_share: tokens of the large model per token of the answers.
            quality: relative to the large model's own.

        Raises:
            TurnoutError: OUT_OF_RANGE with the reachable range.
        """
        if large_share is not None:
            return self._reach(where, self._rising("large_share"), large_share)
        if quality is not None:
            self.expected_at(where, quality)  # refuses what is not reached
            curve = zip(self.points, self._rising("retained"), strict=True)
            return next(point.position for point, value in curve if value >= quality)
        return self.chosen

    def expected_at(self, where: str, quality: float, margin: float = 0.0) -> float:
        """Where a quality is expected, between two points if need be.

        Args:
            where: as in `position_of`.
            quality: relative to the large model's own.
            margin: by how much it is to be exceeded, as far as that can be reached.

        Raises:
            TurnoutError: OUT_OF_RANGE with the reachable range.
        """
        curve = self._rising("retained")
        more = min(quality + margin, curve[-1]) if quality <= curve[-1] else quality
        return self._reach(where, curve, max(more, curve[0]))

    def position_within(self, where: str, budget: float, costs: Sequence[float]) -> float:
        """The last position on the curve that costs no more than a budget.

        Args:
            where: as in `position_of`.
            budget: relative to the large model alone.
            costs: of each point, likewise.

        Raises:
            TurnoutError: OUT_OF_RANGE with the least cost.
        """
        places = [point.position for point in self.points]
        found = None
        for (start, end), (low, high) in zip(pairwise(places), pairwise(costs), strict=True):
            if high <= budget:
                found = end
            elif low <= budget:
                found = start + (end - start) * (budget - low) / (high - low)
        if found is None:
            raise out_of_range(where, f"{budget:g} cannot be kept: the least cost measured is {min(costs):.3f}")
        return found

    def expected(self, position: float) -> list[float]:
        """Share of the values in each bin at a position; empty where nothing was looked at."""
        places = [point.position for point in self.points]
        shares = [[count / max(sum(point.seen), 1) for count in point.seen] for point in self.points]
        return [along(places, column, position) for column in zip(*shares, strict=True)]

    def _rising(self, measure: str) -> list[float]:
        return isotonic([getattr(point, measure).value for point in self.points])

    def _reach(self, where: str, curve: list[float], target: float) -> float:
        """The least position at which a non-decreasing curve comes to the target."""
        if not curve[0] <= target <= curve[-1]:
            low, high = curve[0], curve[-1]
            raise out_of_range(where, f"no {self.knob} reaches {target:g}; reachable: {low:.3f} to {high:.3f}")
        places = [point.position for point in self.points]
        if target == curve[0]:
            return places[0]
        at = next(index for index, value in enumerate(curve) if value >= target)
        part = (target - curve[at - 1]) / (curve[at] - curve[at - 1])
        return places[at - 1] + part * (places[at] - places[at - 1])


_SHAPE = TypeAdapter(KnobCalibration)


def isotonic(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence closest to `values` in squares: neighbours that fall share their mean."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (low, count), (high, more) = blocks.pop(), blocks.pop()
            blocks.append(((low * count + high * more) / (count + more), count + more))
    return [value for value, count in blocks for _ in range(count)]


def along(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """Piecewise linear interpolation; `places` ascend, and the ends hold beyond them."""
    if at <= places[0]:
        return values[0]
    for (start, end), (low, high) in zip(pairwise(places), pairwise(values), strict=True):
        if at < end:  # not at it: rounding could lead out of a parameter's bounds
            return low + (high - low) * (at - start) / (end - start)
        if at == end:
            return high
    return values[-1]
