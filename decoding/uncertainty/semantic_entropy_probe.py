"""Semantic entropy probe: a linear head on hidden states predicts high semantic entropy; nothing is sampled (#50)."""

from __future__ import annotations

from decoding.aggregators.base import AnswerSet, Candidate
from decoding.artifacts import ArtifactName
from decoding.doubt_heads import answer_state, prompt_state
from decoding.model import ModelPool
from decoding.parts import Example, ModelShape
from decoding.step_heads import StateHead
from decoding.uncertainty.base import Uncertainty
from turnout.registry import MethodParams


class ProbeParams(MethodParams):
    """Parameters of `semantic_entropy_probe`."""

    artifact: ArtifactName = "semantic_entropy_probe"


class SemanticEntropyProbe(Uncertainty):
    """Paper #50 (Semantic Entropy Probes): the probability that the semantic entropy is above the artifact's split.

    A logistic regression reads the states of a few adjacent layers at the last token of the prompt, before anything is
    written, or at the second-to-last token of the answer; the artifact says which. One forward, one dot product.
    """

    Params = ProbeParams
    params: ProbeParams
    papers = (50,)
    unit = "probability"
    meaning = "probability that sampled answers would differ in meaning"

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """See `Uncertainty.bounds`."""
        return 0.0, 1.0

    @classmethod
    def example(cls, shape: ModelShape) -> Example:
        """See `Part.example`."""
        settings = {"layers": [shape.layers // 2, shape.layers // 2 + 1], "position": "prompt"}
        return Example(kind=cls.name, head=StateHead(2 * shape.width), settings=settings)

    def check(self, models: ModelPool) -> None:
        """Open the artifact.

        Raises:
            TurnoutError: NOT_FOUND or INVALID_ARGUMENT: there is none of the name, or it does not fit.
        """
        artifact = models.artifacts.open(self.params.artifact, self.name, models, f"{self.where}.artifact")
        [self._role] = artifact.models
        self._head = StateHead.of(artifact)
        self._layers = [int(layer) for layer in artifact.settings["layers"]]
        self.reads_answer = artifact.settings["position"] == "answer"

    async def measure(self, group: AnswerSet, answer: Candidate | None) -> float:
        """See `Uncertainty.measure`: from 0 to 1."""
        seq, _, models = group.context
        model = models.by_role(self._role)
        if not self.reads_answer:
            return self._head.probability(await prompt_state(model, seq, self._layers))
        if answer is None:
            raise ValueError("the probe reads the answer, and there is none yet")
        return self._head.probability(await answer_state(model, seq, answer.ids, self._layers))


PART = SemanticEntropyProbe
