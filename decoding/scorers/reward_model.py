"""A small head on a hidden state says how likely a step is right."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from decoding.artifacts import ArtifactName
from decoding.model import ModelPool
from decoding.scorers.base import Scorer
from decoding.sequence import Sequence
from decoding.step_heads import STEP_WANT, StateHead, step_features
from decoding.steps import without_end
from turnout.registry import MethodParams

WHERE = "method.params.scorer.artifact"


class RewardModelParams(MethodParams):
    """Parameters of `reward_model`."""

    artifact: ArtifactName = "reward_model"
    delta: Annotated[
        FiniteFloat, Field(ge=-1.0, le=2.0, description="least reward of a step that stays; rewards are from 0 to 1")
    ] = 0.7
    weight: Annotated[
        Literal["step", "constant", "clipped", "sigmoid"],
        Field(
            description="chance that a step of reward r stays: 1 from delta on, else 0; always `share`; r itself;"
            " 1 / (1 + exp(-sharpness (r - delta)))"
        ),
    ] = "step"
    share: Annotated[FiniteFloat, Field(ge=0.0, le=1.0, description="for constant")] = 0.5
    sharpness: Annotated[FiniteFloat, Field(gt=0.0, le=1000.0, description="for sigmoid")] = 10.0


class RewardModelScorer(Scorer):
    """Paper #39 (Reward-Guided Speculative Decoding): a process reward of the step's end after the whole prefix.

    The head reads the last hidden state of the model it was trained for, once that has read prefix and step, and how
    far that model expected the step's tokens. A step z of the small model with distribution P_m stays with probability
    w(r(z)), else the large model writes its own, of distribution P_M, unscored: the step's law is
    w(r(z)) P_m(z) + (1 - E[w]) P_M(z).
    """

    Params = RewardModelParams
    threshold = "delta"
    keeps_none = 2.0
    papers = (39,)
    params: RewardModelParams

    def check(self, models: ModelPool) -> None:
        """Open the artifact.

        Raises:
            TurnoutError: NOT_FOUND or INVALID_ARGUMENT: there is none of the name, or it does not fit.
        """
        artifact = models.artifacts.open(self.params.artifact, self.name, models, WHERE)
        [self._role] = artifact.models
        self._head = StateHead.of(artifact)

    @property
    def soft(self) -> str:
        """See `Scorer.soft`."""
        return "" if self.params.weight == "step" else "weight"

    async def score(self, models: ModelPool, seq: Sequence, step: tuple[int, ...]) -> float:
        """A reward from 0 to 1; one forward of the model with the head."""
        text = without_end(step, seq.end_ids)
        rows = await models.by_role(self._role).extend(seq, text, STEP_WANT, every=True)
        return self._head.probability(step_features(rows, text))

    def chance(self, score: float) -> float:
        """The weight w(score)."""
        params = self.params
        match params.weight:
            case "step":
                return 1.0 if score >= params.delta else 0.0
            case "constant":
                return params.share
            case "clipped":
                return min(max(score, 0.0), 1.0)
            case "sigmoid":
                return 1.0 / (1.0 + math.exp(-params.sharpness * (score - params.delta)))


PART = RewardModelScorer
