"""The large model where it is predicted to gain the most over the small one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

from pydantic import Field, FiniteFloat, model_validator

from decoding.artifacts import Artifact, ArtifactName, Kept
from decoding.model import ModelPool
from decoding.parts import PartChoice
from router.base import Asked, RoutingPolicy
from router.decision import Decision
from router.difficulty.curve import RouterCurve
from router.difficulty.drift import GainDrift
from router.difficulty.features import features_of, state_of
from router.difficulty.probe import ROUTER_PROBE, Probe
from router.targets import Outer, Target, follow, methods_of
from turnout.errors import out_of_range
from turnout.registry import MethodParams

TARGETS = ("large_share", "cost", "quality", "threshold")
DEFAULT_SHARE = 0.3


class LearnedParams(MethodParams):
    """Parameters of `learned`."""

    artifact: ArtifactName = "router"
    large_share: Annotated[
        FiniteFloat | None, Field(ge=0, le=1, description="share of requests that go to the large model")
    ] = None
    cost: Annotated[
        FiniteFloat | None,
        Field(ge=0, le=1, description="mean cost of a request, relative to the large model answering all"),
    ] = None
    quality: Annotated[
        FiniteFloat | None, Field(ge=0, le=1, description="mean quality, as a share of the large model's")
    ] = None
    threshold: Annotated[
        FiniteFloat | None, Field(ge=-1, le=2, description="predicted gain from which on the large model answers")
    ] = None
    small: Annotated[Target, Field(description="how a request is answered that gains too little")] = Target(
        method=PartChoice.of("plain", model="small")
    )
    large: Annotated[Target, Field(description="how the others are answered")] = Target(
        method=PartChoice.of("plain", model="large")
    )

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        given = [name for name in TARGETS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give one of {', '.join(TARGETS)}, not {' and '.join(given)}")
        return self


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What is made of an artifact; `threshold` is the gain from which on the large model answers."""

    probe: Probe
    threshold: float
    drift: GainDrift


class LearnedPolicy(RoutingPolicy):
    """Seed 45 (Learning How Hard to Think), its routing: the requests with the largest predicted gain go to it.

    A probe on the small model's state after the prompt predicts the chance that each model is right; the gain is their
    difference. The threshold comes from the artifact's held-out prompts. A caller's `quality` is kept for the request
    itself: the small model answers where its chance is at least that share of the large one's. A caller's `max_cost`
    below 1 leaves the small model only, and one below its share of the parameters is refused.
    """

    Params = LearnedParams
    seeds = (45,)
    params: LearnedParams

    def __init__(self, params: Any = None) -> None:
        super().__init__(params)
        self._kept = Kept(self.params.artifact, ROUTER_PROBE, self._load)
        self._inner = {name: getattr(self.params, name).policy_of(name) for name in ("small", "large")}

    def _load(self, artifact: Artifact) -> _Loaded:
        """Raises TurnoutError: OUT_OF_RANGE: the artifact's curve does not reach the target."""
        curve = RouterCurve.of(artifact)
        drift = GainDrift(curve.gains, self.params.artifact, artifact.version)
        return _Loaded(Probe.load(artifact), self._threshold(curve), drift)

    def check(self, models: ModelPool) -> None:
        """Open the artifact, and find the threshold.

        Raises:
            TurnoutError: NOT_FOUND or INVALID_ARGUMENT: no such artifact, or for other models; OUT_OF_RANGE: a target
                that no threshold reaches, with the reachable range.
        """
        self._kept.get(models, f"{self.where}.artifact")
        for inner in self._inner.values():
            if inner is not None:
                inner.check(models)

    def methods(self, field: str) -> Iterator[tuple[str, PartChoice]]:
        """See `RoutingPolicy.methods`."""
        for side, inner in self._inner.items():
            yield from methods_of(getattr(self.params, side), inner, f"{field}.{side}")

    @classmethod
    def check_params(cls, params: Any, field: str) -> None:
        """See `RoutingPolicy.check_params`."""
        params.small.check(f"{field}.small")
        params.large.check(f"{field}.large")

    async def decide(self, asked: Asked, models: ModelPool) -> Decision:
        """See `RoutingPolicy.decide`."""
        loaded, version = self._kept.get(models, f"{self.where}.artifact")
        row = await asked.read(models)
        features = features_of(row, asked.request.sequence.num_prompt_tokens)
        scores = loaded.probe.predict(state_of(row), features)
        scores["gain"] = scores["p_large"] - scores["p_small"]
        limits = {"gain_from": loaded.threshold}
        drift = loaded.drift.add(scores["gain"])
        if drift is not None:
            asked.drift.append(drift)
            if drift.index > drift.limit:
                asked.request.notes.append(
                    f"predicted gains have left what router {self.params.artifact}, version {version}, was trained on:"
                    f" stability index {drift.index:.2f}"
                )
        side, reason = _side(scores, limits, asked, models)
        outer = Outer(self.name, version, features, reason, limits)
        decision = await follow(getattr(self.params, side), self._inner[side], outer, asked, models)
        return replace(decision, scores={**scores, **decision.scores})

    def _threshold(self, curve: RouterCurve) -> float:
        """The gain from which on the large model answers, from whichever target is set."""
        params = self.params
        if params.threshold is not None:
            return params.threshold
        if params.cost is not None:
            return curve.threshold(curve.share_at_cost(params.cost, f"{self.where}.cost"))
        if params.quality is not None:
            return curve.threshold(curve.share_at_quality(params.quality, f"{self.where}.quality"))
        return curve.threshold(DEFAULT_SHARE if params.large_share is None else params.large_share)


def _side(scores: dict[str, float], limits: dict[str, float], asked: Asked, models: ModelPool) -> tuple[str, str]:
    """Which of the two answers, and why; what the caller set is added to `limits`."""
    gain, threshold = scores["gain"], limits["gain_from"]
    side = "large" if gain >= threshold else "small"
    sign = "at least" if side == "large" else "below"
    reason = f"predicted gain {gain:.3f} is {sign} {threshold:.3f}"
    quality, cost = asked.limits.quality, asked.limits.max_cost
    asked.heeded.update(("quality", "max_cost"))
    if quality is not None:
        limits["quality"] = quality
        enough = scores["p_small"] >= quality * scores["p_large"]
        side = "small" if enough else "large"
        reason = f"the small model is predicted to keep {'enough' if enough else 'less than'} of quality {quality:g}"
    if cost is not None and cost < 1.0:
        limits["max_cost"] = cost
        cheapest = models.small.num_parameters / models.large.num_parameters
        if cost < cheapest:
            raise out_of_range("max_cost", f"{cost:g}; the small model alone costs {cheapest:.3f} of the large one")
        if side == "large" and quality is not None:
            raise out_of_range("quality", f"{quality:g} needs the large model, which costs more than max_cost {cost:g}")
        side, reason = "small", f"max_cost {cost:g} leaves the small model only; {reason}"
    return side, reason


PART = LearnedPolicy
