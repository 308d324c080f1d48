"""The large model where it is predicted to gain the most over the small one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

from pydantic import Field, FiniteFloat, model_validator

from decoding.artifacts import Artifact, ArtifactName, Kept
from decoding.model import ModelPool
from router.base import Asked, RoutingPolicy
from router.decision import Decision, rules_version
from router.difficulty.curve import ALWAYS, NEVER, Cut, RouterCurve
from router.difficulty.drift import GainDrift
from router.difficulty.probe import EXTRA_COST, ROUTER_PROBE, Probe, worth_of
from router.difficulty.reading import ask_probe, check_reads
from router.hashing import share_of
from router.rule_targets import Outer, Target, follow, methods_of
from turnout.errors import invalid, out_of_range
from turnout.part_choice import PartChoice
from turnout.registry import ALONE, MethodParams, get_method

TARGETS = ("large_share", "cost", "quality", "threshold", "miss_weight")
DEFAULT_SHARE = 0.3
TIED = 1e-6  # worths as close as this are one


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
        FiniteFloat | None,
        Field(ge=ALWAYS, le=NEVER, description="predicted gain for its cost from which on the large model answers"),
    ] = None
    miss_weight: Annotated[
        FiniteFloat | None,
        Field(ge=0, description="wasted large answers that one request is worth that only the large model gets right"),
    ] = None
    small: Annotated[Target, Field(description="how a request is answered that gains too little")] = Target(
        method=PartChoice.of(ALONE, model="small")
    )
    large: Annotated[Target, Field(description="how the others are answered")] = Target(
        method=PartChoice.of(ALONE, model="large")
    )

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        given = [name for name in TARGETS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give one of {', '.join(TARGETS)}, not {' and '.join(given)}")
        return self


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What is made of an artifact."""

    probe: Probe
    cut: Cut
    drift: GainDrift


class LearnedPolicy(RoutingPolicy):
    """Paper #45 (Learning How Hard to Think), its routing: the requests with the largest predicted gain go to it.

    A probe on the small model's state after the prompt, or on the prompt's text, predicts the chance that each model is
    right; the gain is their difference. Where it also predicts what the large model's answer costs more, the gain for
    its cost decides: with it a given cost buys most. The paper's answers all cost the same. The threshold comes from
    the artifact's held-out prompts. A caller's `quality` is kept for the request itself: the small model answers where
    its chance is at least that share of the large one's. A caller's `max_cost` below 1 leaves the small model only, and
    one below its share of the parameters is refused. Where `small` is anything but the small model alone, a policy
    there must keep them, and a limit that it does not keep is refused.
    """

    Params = LearnedParams
    papers = (45,)
    params: LearnedParams

    def __init__(self, params: Any = None) -> None:
        super().__init__(params)
        self._rules = rules_version(self.params.model_dump(mode="json"))
        self._kept = Kept(self.params.artifact, ROUTER_PROBE, self._load)
        self._inner = {name: getattr(self.params, name).policy_of(name) for name in ("small", "large")}

    def _load(self, artifact: Artifact) -> _Loaded:
        """Raises TurnoutError: the artifact's curve does not reach the target, or lacks what it is read from."""
        curve = RouterCurve.of(artifact)
        drift = GainDrift(curve.gains, self.params.artifact, artifact.version)
        return _Loaded(Probe.load(artifact), self._cut(curve), drift)

    def check(self, models: ModelPool) -> None:
        """Open the artifact, and find the threshold.

        Raises:
            TurnoutError: NOT_FOUND or INVALID_ARGUMENT: no such artifact, or for other models; OUT_OF_RANGE: a target
                that no threshold reaches, with the reachable range; INVALID_ARGUMENT: `miss_weight` with an artifact
                that has no error rates.
        """
        field = f"{self.where}.artifact"
        check_reads(self._kept.get(models, field)[0].probe, models, field)
        for inner in self._inner.values():
            if inner is not None:
                inner.check(models)

    def keeps(self, decision: Decision) -> bool:
        """See `RoutingPolicy.keeps`."""
        return all(inner.keeps(decision) for inner in self._inner.values() if inner is not None)

    def methods(self, field: str) -> Iterator[tuple[str, PartChoice]]:
        """See `RoutingPolicy.methods`."""
        for side, inner in self._inner.items():
            yield from methods_of(getattr(self.params, side), inner, f"{field}.{side}")

    @classmethod
    def check_params(cls, params: Any, field: str) -> None:
        """See `RoutingPolicy.check_params`."""
        params.small.check(f"{field}.small")
        params.large.check(f"{field}.large")
        promised = {
            "cost": _alone(params.large, "large"),
            "quality": _as_large(params.large),
        }
        for name, known in promised.items():
            if getattr(params, name) is not None and not (known and _alone(params.small, "small")):
                raise invalid(
                    f"{field}.{name}",
                    "is read from answers of each model alone, and says nothing of another `small` or `large`;"
                    " set large_share or threshold",
                )

    async def decide(self, asked: Asked, models: ModelPool) -> Decision:
        """See `RoutingPolicy.decide`."""
        loaded, version = self._kept.get(models, f"{self.where}.artifact")
        scores, features = await ask_probe(loaded.probe, asked, models)
        scores["gain"] = scores["p_large"] - scores["p_small"]
        scores["worth"] = worth_of(scores)
        limits = {"worth_from": loaded.cut.worth}
        if loaded.cut.of_ties < 1.0:
            limits["of_ties"] = loaded.cut.of_ties
        drift = loaded.drift.add(scores["gain"])
        if drift is not None:
            asked.drift.append(drift)
            if drift.index > drift.limit:
                asked.request.notes.append(
                    f"predicted gains have left what router {self.params.artifact}, version {version}, was trained on:"
                    f" stability index {drift.index:.2f}"
                )
        question = asked.prompt_text if loaded.probe.reads == "text" else _prompt_of(asked)
        side, reason = _Choice(self.params, scores, limits, asked, models, question).make()
        outer = Outer(self.name, f"{version}+{self._rules}", features, reason, limits)
        decision = await follow(getattr(self.params, side), self._inner[side], outer, asked, models)
        return replace(decision, scores={**scores, **decision.scores})

    def _cut(self, curve: RouterCurve) -> Cut:
        """Who goes to the large model, from whichever target is set."""
        params = self.params
        if params.threshold is not None:
            return Cut(params.threshold)
        if params.cost is not None:
            return curve.cut(curve.share_at_cost(params.cost, f"{self.where}.cost"))
        if params.quality is not None:
            return curve.cut(curve.share_at_quality(params.quality, f"{self.where}.quality"))
        if params.miss_weight is not None:
            return curve.cut(curve.share_of_least_loss(params.miss_weight, f"{self.where}.miss_weight"))
        return curve.cut(DEFAULT_SHARE if params.large_share is None else params.large_share)


@dataclass(slots=True)
class _Choice:
    """Which of the two sides answers, and why; made for one request.

    A limit of the caller is kept here where what a side runs is known to keep it. A policy on that side that looks at
    the limit keeps it otherwise, and one that no policy keeps is refused by the router.
    """

    params: LearnedParams
    scores: dict[str, float]
    limits: dict[str, float]
    asked: Asked
    models: ModelPool
    question: str
    side: str = ""
    reason: str = ""

    def make(self) -> tuple[str, str]:
        """The side, and why; what the caller set is added to `limits`."""
        self._by_gain()
        quality, cost = self.asked.limits.quality, self.asked.limits.max_cost
        if cost is not None and cost < 1.0 and self.params.small.policy is not None:
            self.limits["max_cost"] = cost
            return "small", f"max_cost {cost:g} leaves the small side only; {self.reason}"
        if quality is not None:
            self._keep_quality(quality)
        if cost is not None and cost < 1.0:
            self._keep_cost(cost)
        elif cost is not None and _alone(getattr(self.params, self.side), self.side):
            self.asked.read_limits.add("max_cost")
        return self.side, self.reason

    def _by_gain(self) -> None:
        """By the threshold; where many have just that worth, a part of the questions, always the same ones."""
        worth, threshold = self.scores["worth"], self.limits["worth_from"]
        said = f"predicted gain {self.scores['gain']:.3f}"
        if (extra := self.scores.get(EXTRA_COST)) is not None:
            said += f" for {extra:.2f} of the mean extra cost, {worth:.3f},"
        of_ties = self.limits.get("of_ties", 1.0)
        if of_ties < 1.0 and abs(worth - threshold) <= TIED:
            self.side = "large" if share_of(0, "worth tie", self.question) < of_ties else "small"
            self.reason = f"{said} is one of many, of which {of_ties:.0%} go to the large model"
            return
        self.side = "large" if worth >= threshold else "small"
        sign = "at least" if self.side == "large" else "below"
        self.reason = f"{said} is {sign} {threshold:.3f}"

    def _keep_quality(self, quality: float) -> None:
        """The small side where the small model alone is good enough; `p_small` says nothing about anything else."""
        if _alone(self.params.small, "small"):
            self.limits["quality"] = quality
            enough = self.scores["p_small"] >= quality * self.scores["p_large"]
            self.side = "small" if enough else "large"
            kept = "enough" if enough else "less than"
            self.reason = f"the small model is predicted to keep {kept} of quality {quality:g}"
            if enough:
                self.asked.read_limits.add("quality")
        if self.side == "large" and _as_large(self.params.large):
            self.limits["quality"] = quality
            self.asked.read_limits.add("quality")

    def _keep_cost(self, cost: float) -> None:
        """Below 1 only the small model alone is left."""
        if not _alone(self.params.small, "small"):
            return
        self.limits["max_cost"] = cost
        cheapest = self.models.token_cost("small") / self.models.token_cost("large")
        if cost < cheapest:
            raise out_of_range("max_cost", f"{cost:g}; the small model alone costs {cheapest:.3f} of the large one")
        quality = self.asked.limits.quality
        if self.side == "large" and quality is not None:
            raise out_of_range("quality", f"{quality:g} needs the large model, which costs more than max_cost {cost:g}")
        self.asked.read_limits.add("max_cost")
        self.side, self.reason = "small", f"max_cost {cost:g} leaves the small model only; {self.reason}"


def _prompt_of(asked: Asked) -> str:
    sequence = asked.request.sequence
    return ",".join(map(str, sequence.tokens[: sequence.num_prompt_tokens]))


def _alone(target: Target, role: str) -> bool:
    """Whether the model of a role answers by itself, whose cost and chance of a right answer are known."""
    made = target.method
    return made is not None and made.name == ALONE and made.params.get("model", "large") == role


def _as_large(target: Target) -> bool:
    """Whether the answers are the large model's own, however they are come by."""
    if target.method is None or target.method.params.get("model", "large") != "large":
        return False
    method = get_method(target.method.name)
    return method.keeps_law(method.parse(target.method.params))


PART = LearnedPolicy
