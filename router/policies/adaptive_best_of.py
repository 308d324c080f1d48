"""As many samples as are predicted to be worth it, under a budget of samples a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from decoding.artifacts import Artifact, ArtifactName, Kept
from decoding.model import ModelPool
from router.allocation import Bins, SlidingWindow, marginals
from router.base import Asked, RoutingPolicy
from router.decision import Decision, rules_version
from router.difficulty.features import features_of, state_of
from router.difficulty.probe import ROUTER_PROBE, Probe
from turnout.registry import MethodParams


class AdaptiveBestOfParams(MethodParams):
    """Parameters of `adaptive_best_of`."""

    artifact: ArtifactName = "router"
    model: Annotated[Literal["small", "large"], Field(description="role of the model that answers")] = "small"
    average: Annotated[FiniteFloat, Field(ge=1, le=64, description="samples a request, on average")] = 3.0
    most: Annotated[int, Field(ge=1, le=64, description="samples of one request")] = 8
    by: Annotated[
        Literal["bins", "window"],
        Field(
            description="bins: by predicted difficulty alone, solved over the artifact's held-out prompts;"
            " window: beside the last requests, never more than their budget"
        ),
    ] = "bins"
    bins: Annotated[int, Field(ge=2, le=50, description="for bins: how many")] = 10
    window: Annotated[int, Field(ge=1, le=1024, description="for window: requests")] = 64
    rerank: Annotated[Literal["majority", "logprob"], Field(description="see the method best_of")] = "majority"
    temperature: Annotated[
        FiniteFloat, Field(gt=0, le=2, description="of several samples, where the caller asked for temperature 0")
    ] = 0.8

    @model_validator(mode="after")
    def _check_average(self) -> Self:
        if self.average > self.most:
            raise ValueError(f"average must be at most most ({self.most})")
        return self


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What is made of an artifact."""

    probe: Probe
    bins: Bins


class AdaptiveBestOfPolicy(RoutingPolicy):
    """Seed 45 (Learning How Hard to Think): samples go where another one is predicted to bring the most.

    From the predicted chance of success follows what each further sample adds; hopeless and sure requests get one.
    By window, a decision also depends on the requests before it.
    """

    Params = AdaptiveBestOfParams
    seeds = (45,)
    params: AdaptiveBestOfParams

    def __init__(self, params: Any = None) -> None:
        super().__init__(params)
        self._rules = rules_version(self.params.model_dump(mode="json"))
        self._kept = Kept(self.params.artifact, ROUTER_PROBE, self._load)
        self._window = SlidingWindow(self.params.average, self.params.window, least=1)

    def _load(self, artifact: Artifact) -> _Loaded:
        params, chances = self.params, artifact.settings["quantiles"][f"p_{self.params.model}"]
        return _Loaded(Probe.load(artifact), Bins.solve(chances, params.average, params.most, params.bins, least=1))

    def check(self, models: ModelPool) -> None:
        """Open the artifact.

        Raises:
            TurnoutError: NOT_FOUND or INVALID_ARGUMENT: no such artifact, or for other models.
        """
        self._kept.get(models, f"{self.where}.artifact")

    async def decide(self, asked: Asked, models: ModelPool) -> Decision:
        """See `RoutingPolicy.decide`."""
        params = self.params
        loaded, version = self._kept.get(models, f"{self.where}.artifact")
        row = await asked.read(models)
        features = features_of(row, asked.request.sequence.num_prompt_tokens)
        scores = loaded.probe.predict(state_of(row), features)
        chance = scores[f"p_{params.model}"]
        count = loaded.bins.of(chance) if params.by == "bins" else self._window.give(marginals(chance, params.most))
        return Decision(
            "best_of",
            {"model": params.model, "k": count, "rerank": params.rerank},
            self.name,
            f"{version}+{self._rules}",
            features,
            {**scores, "samples": float(count)},
            {"average": params.average, "most": float(params.most)},
            f"{count} samples at a predicted chance of success of {chance:.2f} each",
            {"greedy_temperature": params.temperature} if count > 1 else {},
        )


PART = AdaptiveBestOfPolicy
