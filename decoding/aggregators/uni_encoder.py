"""Uni-Encoder: a trained ranker reads all answers in one forward, none of which sees another (paper #160)."""

from __future__ import annotations

import torch

from decoding.aggregators.base import AnswerSet, ValuedAggregator
from decoding.artifacts import ArtifactName
from decoding.model import Model, ModelPool, Readout, ReadSpec
from decoding.packed_reading import read_packed
from decoding.parts import Example, ModelShape
from decoding.sequence import Sequence
from decoding.step_heads import LAST, StateHead
from decoding.steps import without_end
from turnout.registry import MethodParams

STATES = ReadSpec(draw=None, hidden=frozenset({LAST}))


class UniEncoderParams(MethodParams):
    """Parameters of `uni_encoder`."""

    artifact: ArtifactName = "uni_encoder"


class UniEncoder(ValuedAggregator):
    """Paper #160 (Uni-Encoder): a head on the mean of each answer's hidden states, after the prompt.

    All answers are fed together, each at the place after the prompt, under a mask by which it sees the prompt and
    itself. The prompt is causal, so that a score is that of a pass with this answer alone. Values are a softmax over
    the answers. `turnout train uni_encoder` fits the head; the model stays as it is.
    """

    Params = UniEncoderParams
    params: UniEncoderParams
    papers = (160,)
    score = "share of the answers' softmax, from 0 to 1"

    @classmethod
    def example(cls, shape: ModelShape) -> Example:
        """See `Part.example`."""
        return Example(kind=cls.name, head=StateHead(shape.width))

    def check(self, models: ModelPool) -> None:
        """Open the artifact.

        Raises:
            TurnoutError: NOT_FOUND or INVALID_ARGUMENT: there is none of the name, or it does not fit.
        """
        artifact = models.artifacts.open(self.params.artifact, self.name, models, f"{self.where}.artifact")
        [self._role] = artifact.models
        self._head = StateHead.of(artifact)

    async def values(self, group: AnswerSet) -> list[float]:
        """See `ValuedAggregator.values`."""
        seq, _, models = group.context
        states = await pooled_states(models.by_role(self._role), seq, [each.ids for each in group.answers])
        scores: list[float] = self._head(states).softmax(0).tolist()
        return scores


async def pooled_states(model: Model, seq: Sequence, answers: list[tuple[int, ...]]) -> torch.Tensor:
    """Read answers to a sequence: float32 [n, hidden] on the CPU, the mean of each one's last hidden states.

    Args:
        model: reads.
        seq: the sequence; nothing is appended.
        answers: tokens of each; one that ends the answer is left out.
    """
    texts = [without_end(ids, seq.end_ids) or ids for ids in answers]
    return torch.stack(await read_packed(model, seq, texts, STATES, _mean_state))


def _mean_state(rows: list[Readout]) -> torch.Tensor:
    return torch.stack([row.hidden[LAST].float() for row in rows]).mean(0).cpu()


PART = UniEncoder
