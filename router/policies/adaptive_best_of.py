"""As many samples as are predicted to be worth it, under a budget of samples a request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from decoding.aggregators.base import AggregatorChoice
from decoding.artifacts import Artifact, ArtifactName, Kept
from decoding.model import ModelPool
from router.allocation import Bins, SlidingWindow, falling, marginals
from router.base import Asked, RoutingPolicy
from router.decision import Decision, rules_version
from router.difficulty.probe import MARGINALS_PROBE, ROUTER_PROBE, Probe
from router.difficulty.reading import ask_probe, check_reads
from turnout.errors import Code, TurnoutError, invalid
from turnout.part_choice import PartChoice
from turnout.registry import MethodParams

REWARD = "reward"  # the aggregator whose artifact has a parameter of its own here


class AdaptiveBestOfParams(MethodParams):
    """Parameters of `adaptive_best_of`."""

    artifact: ArtifactName = "router"
    model: Annotated[Literal["small", "large"], Field(description="role of the model that answers")] = "small"
    average: Annotated[FiniteFloat, Field(gt=0, le=64, description="samples a request, on average")] = 3.0
    least: Annotated[
        Literal[0, 1],
        Field(description="samples of every request; 0, for bins: one that is predicted to be hopeless is refused"),
    ] = 1
    most: Annotated[int, Field(ge=1, le=64, description="samples of one request")] = 8
    by: Annotated[
        Literal["bins", "window", "marginals"],
        Field(
            description="bins: by predicted difficulty alone, solved over the artifact's held-out prompts;"
            " window: together with the last requests, never more than their budget;"
            " marginals: as window, by an artifact of `--predict marginals`, for rewards of any size"
        ),
    ] = "bins"
    bins: Annotated[int, Field(ge=2, le=50, description="for bins: how many")] = 10
    window: Annotated[int, Field(ge=1, le=1024, description="for window and marginals: requests")] = 64
    rerank: Annotated[AggregatorChoice, Field(description="which sample is shown; see the method best_of")] = (
        PartChoice(name="majority")
    )
    reward_model: Annotated[
        ArtifactName, Field(description="for rerank reward: the artifact that finds the best sample")
    ] = "reward_model"
    temperature: Annotated[
        FiniteFloat, Field(gt=0, le=2, description="of several samples, where the caller asked for temperature 0")
    ] = 0.8

    @model_validator(mode="after")
    def _check_average(self) -> Self:
        if self.average < self.least:
            raise ValueError("average must be at least 1, or least 0")
        if not self.least and self.by != "bins":
            # What earlier requests have spent would refuse good questions.
            raise ValueError("least 0 goes with by bins alone")
        if self.average > self.most:
            raise ValueError(f"average must be at most most ({self.most})")
        return self

    def choice(self, count: int) -> PartChoice:
        """The method, with this number of samples."""
        shown = {"artifact": self.reward_model} if self.rerank.name == REWARD else {}
        rerank = self.rerank.model_dump(mode="json")
        return PartChoice.of("best_of", model=self.model, k=count, rerank=rerank, **shown)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What is made of an artifact; without bins where requests share a window."""

    probe: Probe
    bins: Bins | None = None


class AdaptiveBestOfPolicy(RoutingPolicy):
    """Paper #45 (Learning How Hard to Think): samples go where another one is predicted to bring the most.

    From the predicted chance of success follows what each further sample adds; hopeless and sure requests get one,
    or hopeless ones none, where a refusal is as good as a wrong answer. Where rewards are more than right and wrong, a
    probe predicts what each sample adds itself. By window and by marginals, a decision also depends on the requests
    before it.
    """

    Params = AdaptiveBestOfParams
    papers = (45,)
    params: AdaptiveBestOfParams

    def __init__(self, params: Any = None) -> None:
        super().__init__(params)
        self._rules = rules_version(self.params.model_dump(mode="json"))
        kind = MARGINALS_PROBE if self.params.by == "marginals" else ROUTER_PROBE
        self._kept = Kept(self.params.artifact, kind, self._load)
        self._window = SlidingWindow(self.params.average, self.params.window, self.params.least)

    def _load(self, artifact: Artifact) -> _Loaded:
        params, probe = self.params, Probe.load(artifact)
        if params.by == "marginals":
            self._check_marginals(probe, artifact.settings["role"])
        if params.by != "bins":
            return _Loaded(probe)
        chances = artifact.settings["quantiles"][f"p_{params.model}"]
        return _Loaded(probe, Bins.solve(chances, params.average, params.most, params.bins, params.least))

    def _check_marginals(self, probe: Probe, role: str) -> None:
        """Refuse marginals of the other model, and fewer than samples may be asked for."""
        if role != self.params.model:
            raise invalid(f"{self.where}.model", f"is {self.params.model}; the artifact is about samples of {role}")
        if self.params.most > len(probe.labels):
            raise invalid(
                f"{self.where}.most", f"is {self.params.most}; the artifact predicts {len(probe.labels)} samples"
            )

    def check(self, models: ModelPool) -> None:
        """Open the artifact.

        Raises:
            TurnoutError: NOT_FOUND or INVALID_ARGUMENT: no such artifact, or for other models.
        """
        field = f"{self.where}.artifact"
        check_reads(self._kept.get(models, field)[0].probe, models, field)

    def keeps(self, decision: Decision) -> bool:
        """See `RoutingPolicy.keeps`: what shares a window's budget is counted each time, so none is kept."""
        return self.params.by == "bins" or self.name not in decision.policy.split("/")

    def methods(self, field: str) -> Iterator[tuple[str, PartChoice]]:
        """See `RoutingPolicy.methods`."""
        named = "reward_model" if self.params.rerank.name == REWARD else "rerank"
        yield f"{field}.{named}", self.params.choice(self.params.most)

    async def decide(self, asked: Asked, models: ModelPool) -> Decision:
        """See `RoutingPolicy.decide`."""
        params = self.params
        loaded, version = self._kept.get(models, f"{self.where}.artifact")
        scores, features = await ask_probe(loaded.probe, asked, models)
        count, reason = self._samples(loaded, scores)
        if not count:
            raise TurnoutError(Code.OUT_OF_RANGE, f"no answer is worth a sample {reason}")
        chosen = params.choice(count)
        return Decision(
            chosen.name,
            chosen.params,
            self.name,
            f"{version}+{self._rules}",
            features,
            {**scores, "samples": float(count)},
            {"average": params.average, "most": float(params.most)},
            f"{count} samples {reason}",
            {"greedy_temperature": params.temperature} if count > 1 else {},
        )

    def _samples(self, loaded: _Loaded, scores: dict[str, float]) -> tuple[int, str]:
        """How many samples a request gets, and by what."""
        params = self.params
        if params.by == "marginals":
            first, *others = (scores[label] for label in loaded.probe.labels[: params.most])
            # Everybody gets a first sample: its reward, which may be negative, bounds nothing.
            added = [first, *falling(others)]
            gain = sum(added[1:])
            return self._window.give(added), f"where further ones are predicted to add {gain:.3g} to the reward"
        chance = scores[f"p_{params.model}"]
        count = self._window.give(marginals(chance, params.most)) if loaded.bins is None else loaded.bins.of(chance)
        return count, f"at a predicted chance of success of {chance:.2f} each"


PART = AdaptiveBestOfPolicy
