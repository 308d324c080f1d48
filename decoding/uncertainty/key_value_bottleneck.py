"""Discrete key-value bottleneck: frozen keys on a prompt's state fetch values that learn without forgetting (#72)."""

from __future__ import annotations

from decoding.aggregators.base import AnswerSet, Candidate
from decoding.artifacts import ArtifactName
from decoding.doubt_heads import BottleneckHead, prompt_state
from decoding.model import ModelPool
from decoding.parts import Example, ModelShape
from decoding.uncertainty.base import Uncertainty
from turnout.registry import MethodParams


class BottleneckParams(MethodParams):
    """Parameters of `key_value_bottleneck`."""

    artifact: ArtifactName = "key_value_bottleneck"


class KeyValueBottleneck(Uncertainty):
    """Paper #72 (Discrete Key-Value Bottleneck): the probability of high doubt, from the state of the prompt's end.

    The artifact holds keys that were placed on unlabelled prompts, and values that were learnt one prompt after the
    other: what was learnt of some prompts stays as it was while others are learnt, where they fetch other keys.
    """

    Params = BottleneckParams
    params: BottleneckParams
    papers = (72,)
    unit = "probability"
    meaning = "probability that sampled answers would differ in meaning"

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """See `Uncertainty.bounds`."""
        return 0.0, 1.0

    @classmethod
    def example(cls, shape: ModelShape) -> Example:
        """See `Part.example`."""
        head = BottleneckHead(shape.width, 2, 4, 8, 4)
        head.place_keys(head.mean + 0.1 * head.spread * (1.0 + head.mean.new_ones(16, shape.width).cumsum(0)))
        return Example(kind=cls.name, head=head, settings={"layers": [-1]})

    def check(self, models: ModelPool) -> None:
        """Open the artifact.

        Raises:
            TurnoutError: NOT_FOUND or INVALID_ARGUMENT: there is none of the name, or it does not fit.
        """
        artifact = models.artifacts.open(self.params.artifact, self.name, models, f"{self.where}.artifact")
        [self._role] = artifact.models
        self._head = BottleneckHead.of(artifact)
        self._layers = [int(layer) for layer in artifact.settings["layers"]]

    async def measure(self, group: AnswerSet, answer: Candidate | None) -> float:
        """See `Uncertainty.measure`: from 0 to 1."""
        seq, _, models = group.context
        return self._head.probability(await prompt_state(models.by_role(self._role), seq, self._layers))


PART = KeyValueBottleneck
