"""Limits of cost, time and quality, kept by choosing among ways of answering whose costs are known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from decoding.artifacts import ArtifactName
from decoding.calibrated_params import configured
from decoding.calibration import KnobCalibration, isotonic
from decoding.model import ModelPool
from router.base import Asked, RoutingPolicy
from router.decision import Decision, rules_version
from turnout.errors import TurnoutError, out_of_range
from turnout.part_choice import PartChoice
from turnout.registry import MethodParams, get_method

Positive = Annotated[FiniteFloat, Field(gt=0)]
Share = Annotated[FiniteFloat, Field(ge=0, le=1)]
LIMITS = {"max_cost": "cost", "max_latency_s": "latency_s", "quality": "quality"}


class Entry(BaseModel):
    """A way of answering and what is known about it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Annotated[PartChoice, Field(description="decoding method: NAME, or {name: NAME, PARAMETER: ...}")]
    cost: Annotated[Positive, Field(description="relative to the large model alone")]
    quality: Annotated[Share, Field(description="relative to the large model alone")]
    seconds: Annotated[FiniteFloat, Field(ge=0, description="of an answer, besides those per token")] = 0.0
    seconds_per_token: Annotated[
        Positive | None, Field(description="of an answer; absent: no limit of the time can be kept with it")
    ] = None


class BudgetParams(MethodParams):
    """Parameters of `budget`."""

    table: Annotated[tuple[Entry, ...], Field(max_length=200, description="ways of answering")] = ()
    calibrations: Annotated[
        tuple[ArtifactName, ...],
        Field(max_length=16, description="artifacts of `turnout calibrate`: each measured setting is one more way"),
    ] = ()
    max_cost: Annotated[Positive | None, Field(description="where the request sets none; absent: any")] = None
    max_latency_s: Annotated[Positive | None, Field(description="where the request sets none; absent: any")] = None
    quality: Annotated[Share | None, Field(description="where the request sets none; absent: any")] = None
    when_none: Annotated[
        Literal["refuse", "nearest"],
        Field(description="where no way keeps every limit: refuse the request, or take what exceeds them least"),
    ] = "refuse"

    @model_validator(mode="after")
    def _check_any(self) -> BudgetParams:
        if not self.table and not self.calibrations:
            raise ValueError("give a table, calibrations or both")
        return self


@dataclass(frozen=True, slots=True)
class Way:
    """An entry with the time it takes for one request."""

    method: str
    params: dict[str, Any]
    cost: float
    quality: float
    latency_s: float | None = None

    def excess(self, limits: dict[str, float]) -> float:
        """How far beyond the limits it is, as the largest share of a limit; 0.0 within them."""
        worst = 0.0
        for name, limit in limits.items():
            value = getattr(self, LIMITS[name])
            if value is None:
                return float("inf")
            over = (limit - value) if name == "quality" else (value - limit)
            worst = max(worst, over / limit if limit else over)
        return worst


class BudgetPolicy(RoutingPolicy):
    """Keeps limits of cost, time and quality: the cheapest way of the quality wanted, or the best within the rest.

    With a limit of quality, the cheapest way that keeps every limit; without one, the best that does, and of these
    the cheapest. The first in the table wins a tie.
    """

    Params = BudgetParams
    params: BudgetParams

    def __init__(self, params: Any = None) -> None:
        super().__init__(params)
        self._version = rules_version(self.params.model_dump(mode="json"))
        self._ways: dict[str, tuple[KnobCalibration, list[Way]]] = {}

    def check(self, models: ModelPool) -> None:
        """See `Part.check`."""
        self._calibrated(models)

    def methods(self, field: str) -> Iterator[tuple[str, PartChoice]]:
        """See `RoutingPolicy.methods`."""
        for place, entry in enumerate(self.params.table):
            yield f"{field}.table.{place}.method", entry.method
        for place, name in enumerate(self.params.calibrations):
            if name in self._ways:
                # Its ways differ in the share alone: what one of them lacks, all do.
                way = self._ways[name][1][0]
                yield f"{field}.calibrations.{place}", PartChoice(name=way.method, params=way.params)

    @classmethod
    def check_params(cls, params: Any, field: str) -> None:
        """See `RoutingPolicy.check_params`."""
        for place, entry in enumerate(params.table):
            where = f"{field}.table.{place}.method"
            get_method(entry.method.name, f"{where}.name").parse(entry.method.params, where)

    async def decide(self, asked: Asked, models: ModelPool) -> Decision:
        """See `RoutingPolicy.decide`."""
        limits = self._limits(asked)
        max_tokens = asked.request.sequence.sampling.max_tokens
        calibrated, version = self._calibrated(models)
        ways = [*(_timed(entry, max_tokens) for entry in self.params.table), *calibrated]
        within = [way for way in ways if way.excess(limits) <= 1e-9]
        if within:
            best = min(
                within, key=lambda way: (way.cost, -way.quality) if "quality" in limits else (-way.quality, way.cost)
            )
            aim = "the cheapest" if "quality" in limits else "the best"
            reason = f"{aim} of {len(within)} ways within the limits"
        elif self.params.when_none == "refuse":
            raise _refusal(asked, limits, ways)
        else:
            best = min(ways, key=lambda way: way.excess(limits))
            reason = f"no way keeps every limit; this one exceeds them least, by {best.excess(limits):.1%}"
        if "max_latency_s" in limits:
            # A way that was found quick enough for a short answer says nothing about a longer one.
            limits["max_tokens"] = float(max_tokens)
        scores = {"cost": best.cost, "quality": best.quality}
        if best.latency_s is not None:
            scores["latency_s"] = best.latency_s
        features = {"max_tokens": float(max_tokens), "ways": float(len(ways)), "ways_within": float(len(within))}
        return Decision(best.method, best.params, self.name, version, features, scores, limits, reason)

    def _limits(self, asked: Asked) -> dict[str, float]:
        """The request's own, and the configured ones it leaves open."""
        found = {}
        asked.read_limits.update(LIMITS)
        for name in LIMITS:
            given = getattr(asked.limits, name)
            value = getattr(self.params, name) if given is None else given
            if value is not None:
                found[name] = float(value)
        return found

    def _calibrated(self, models: ModelPool) -> tuple[list[Way], str]:
        """What the calibrations hold now, and a name for them with table and limits."""
        ways: list[Way] = []
        versions = []
        for place, name in enumerate(self.params.calibrations):
            found = configured(models, name, f"{self.where}.calibrations.{place}")
            if name not in self._ways or self._ways[name][0] is not found:
                self._ways[name] = (found, _ways_of(name, found))
            ways += self._ways[name][1]
            versions.append(found.version)
        return ways, "+".join([*versions, self._version])


def _timed(entry: Entry, max_tokens: int) -> Way:
    rate = entry.seconds_per_token
    latency_s = entry.seconds + rate * max_tokens if rate is not None else None
    return Way(entry.method.name, entry.method.params, entry.cost, entry.quality, latency_s)


def _ways_of(name: str, found: KnobCalibration) -> list[Way]:
    """The measured settings of a calibration, each by its share, so that answers name the calibration and are watched.

    The cost is the paper's, parameters per token written. Share and quality are what the curve promises: a lucky
    point promises nothing. Where several points have one share, it is met by the first.
    """
    shares = isotonic([point.large_share.value for point in found.points])
    qualities = isotonic([point.retained.value for point in found.points])
    ways = []
    for place, (point, share, quality) in enumerate(zip(found.points, shares, qualities, strict=True)):
        if place == 0 or share > shares[place - 1]:
            params = {**found.fixed, "calibration": name, "large_share": min(share, 1.0)}
            ways.append(Way(found.method, params, point.paper.value, min(quality, 1.0)))
    return ways


def _refusal(asked: Asked, limits: dict[str, float], ways: list[Way]) -> TurnoutError:
    """Says what can be had where one limit alone cannot be kept, and else that they contradict each other."""
    for name, limit in limits.items():
        known = [value for way in ways if (value := getattr(way, LIMITS[name])) is not None]
        best = (max if name == "quality" else min)(known, default=None)
        if best is None or min(way.excess({name: limit}) for way in ways) > 1e-9:
            reach = f"{best:.4g} can be had" if best is not None else "nothing is known about it"
            return out_of_range(f"limits.{name}", f"{limit:g} cannot be kept: {reach}")
    together = ", ".join(f"{name} {limit:g}" for name, limit in limits.items())
    return out_of_range("limits", f"no way of answering keeps all of {together}")


PART = BudgetPolicy
