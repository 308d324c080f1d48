"""RankGen: a trained dual encoder finds the answer that goes best with the prompt (paper #180)."""

from __future__ import annotations

from decoding.aggregators._embeddings import mean_states
from decoding.aggregators.base import AnswerSet, ValuedAggregator
from decoding.artifacts import ArtifactName
from decoding.model import ModelPool
from decoding.pair_heads import PairHead
from decoding.parts import Example, ModelShape
from turnout.registry import MethodParams


class RankGenParams(MethodParams):
    """Parameters of `rank_gen`."""

    artifact: ArtifactName = "rank_gen"


class RankGen(ValuedAggregator):
    """Paper #180 (RankGen), its reranking of whole answers: the dot product of prompt's and answer's vectors.

    Prompt and answers are read each alone by the frozen model, and their mean states go through a map for prefixes
    and one for continuations. `turnout train rank_gen` fits both maps, against other parts of the same text and
    against the model's own continuations.
    """

    Params = RankGenParams
    params: RankGenParams
    papers = (180,)
    score = "dot product of the vectors of prompt and answer"

    @classmethod
    def example(cls, shape: ModelShape) -> Example:
        """See `Part.example`."""
        return Example(kind=cls.name, head=PairHead(shape.width, 8))

    def check(self, models: ModelPool) -> None:
        """Open the artifact.

        Raises:
            TurnoutError: NOT_FOUND or INVALID_ARGUMENT: there is none of the name, or it does not fit.
        """
        artifact = models.artifacts.open(self.params.artifact, self.name, models, f"{self.where}.artifact")
        [self._role] = artifact.models
        self._head = PairHead.of(artifact)

    async def values(self, group: AnswerSet) -> list[float]:
        """See `ValuedAggregator.values`."""
        seq, _, models = group.context
        texts = [tuple(seq.tokens), *(each.ids for each in group.answers)]
        states = await mean_states(models.by_role(self._role), seq, texts)
        scores: list[float] = self._head(states[:1], states[1:])[0].tolist()
        return scores


PART = RankGen
