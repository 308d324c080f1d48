"""The answer that a reward model finds best, read as one step."""

from __future__ import annotations

import asyncio

from decoding.aggregators.base import AnswerSet, ValuedAggregator
from decoding.artifacts import ArtifactName
from decoding.model import ModelPool
from decoding.packed_reading import packs
from decoding.parts import Example, ModelShape
from decoding.scorers.reward_model import RewardModelParams, RewardModelScorer
from decoding.step_heads import StateHead
from turnout.registry import MethodParams

AT_ONCE = 2048


class RewardParams(MethodParams):
    """Parameters of `reward`."""

    artifact: ArtifactName = "reward_model"


class Reward(ValuedAggregator):
    """The scorer `reward_model` reads each whole answer, in one forward each; rewards are from 0 to 1.

    Answers are read together as far as the logits of their tokens, which it reads too, are `AT_ONCE` rows.
    """

    Params = RewardParams
    params: RewardParams
    score = "reward, from 0 to 1"

    @classmethod
    def example(cls, shape: ModelShape) -> Example:
        """See `Part.example`: a head on the state, and three numbers about the tokens."""
        return Example(kind="reward_model", head=StateHead(shape.width + 3))

    def check(self, models: ModelPool) -> None:
        """Open the artifact.

        Raises:
            TurnoutError: NOT_FOUND or INVALID_ARGUMENT: there is none of the name, or it does not fit.
        """
        self._scorer = RewardModelScorer(RewardModelParams(artifact=self.params.artifact))
        self._scorer.check(models)

    async def values(self, group: AnswerSet) -> list[float]:
        """See `ValuedAggregator.values`."""
        seq, _, models = group.context
        found: dict[int, float] = {}
        for places in packs([len(each.ids) for each in group.answers], AT_ONCE):
            texts = [group.answers[place].ids for place in places]
            scores = await asyncio.gather(*(self._scorer.score(models, seq, ids) for ids in texts))
            found.update(zip(places, scores, strict=True))
        return [found[place] for place in range(len(group.answers))]


PART = Reward
