"""A classifier decides after each drafted token whether to go on."""

from __future__ import annotations

from collections.abc import Sequence as Path
from typing import Annotated

from pydantic import Field

from decoding.artifacts import Artifact, ArtifactName
from decoding.length_heads import ContinueHead
from decoding.lengths._trained import TrainedLength, TrainedParams
from decoding.lengths.base import Round, Step
from decoding.model import ReadSpec
from decoding.parts import Example, ModelShape
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult


class DiscoParams(TrainedParams):
    """Parameters of `disco`."""

    artifact: ArtifactName = "disco"
    threshold: Annotated[
        float | None,
        Field(ge=0, le=1, description="least chance of acceptance to draft on; absent: the one tuned for time"),
    ] = None


class DiscoLength(TrainedLength):
    """Dynamic speculation lookahead (paper #73, DISCO).

    A two-layer network sees the largest probabilities of the token's distribution, its entropy and the token's place
    in the draft, and says how likely the token, and all before it, will be accepted. Below the threshold drafting
    ends; the token itself stays. Threshold and deepest draft were tuned for time when the head was trained. It
    has learned from answers without a structure and reads the distribution before one; at a forced token drafting does
    not end.
    """

    Params = DiscoParams
    params: DiscoParams
    papers = (73,)

    @classmethod
    def example(cls, shape: ModelShape) -> Example:
        """See `Part.example`."""
        settings = {"threshold": 0.4, "most": 5}
        return Example(kind=cls.name, head=ContinueHead(10, 8), settings=settings, roles=("small", "large"))

    def use(self, artifact: Artifact) -> None:
        """See `TrainedLength.use`."""
        self._head = ContinueHead.of(artifact)
        given = self.params.threshold
        self._threshold: float = artifact.settings["threshold"] if given is None else given
        self._most: int = min(self.params.most, artifact.settings["most"])
        self.want = ReadSpec(draw=None, entropy=True, unmasked=True, top=self._head.top)

    def before_round(self, round: Round) -> int:
        """The tuned depth, or what the request allows where that is less."""
        return min(super().before_round(round), self._most)

    def continues(self, path: Path[Step]) -> bool:
        """Return whether the classifier expects the last token to be accepted."""
        row = path[-1].row
        return row.forced or self._head.probability(row, len(path)) >= self._threshold

    def observe(self, draft: DraftTree, verdict: VerifyResult, seconds: float) -> None:
        """Trained beforehand: nothing to learn."""


PART = DiscoLength
