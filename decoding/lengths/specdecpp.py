"""Draft until any rejection has become too likely."""

from __future__ import annotations

from collections.abc import Sequence as Path
from typing import Annotated

from pydantic import Field

from decoding.artifacts import Artifact, ArtifactName
from decoding.length_heads import AcceptanceHead
from decoding.lengths._trained import TrainedLength, TrainedParams
from decoding.lengths.base import Depth, Step
from decoding.model import Readout, ReadSpec
from decoding.parts import Example, ModelShape
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult

LAST = -1


class SpecDecPlusPlusParams(TrainedParams):
    """Parameters of `specdecpp`."""

    artifact: ArtifactName = "specdecpp"
    threshold: Annotated[
        float, Field(ge=0, le=1, description="the draft ends once any rejection in it is more likely than this")
    ] = 0.3
    least: Annotated[Depth, Field(description="shortest draft that may be ended, tokens")] = 2


class SpecDecPlusPlusLength(TrainedLength):
    """Acceptance prediction head (paper #105, SpecDec++).

    The policy that minimises expected time ends a draft once 1 - prod p_acc(y_i) passes a threshold. The head reads
    p_acc(y_i) from the draft's last hidden state at y_i, which exists once y_i has been fed: that is when y_(i+1) is
    chosen, so the product lags one token behind and costs no forward of its own, and whatever was drawn stays.
    """

    Params = SpecDecPlusPlusParams
    params: SpecDecPlusPlusParams
    papers = (105,)
    want = ReadSpec(draw=None, hidden=frozenset({LAST}))
    _root: Readout | None = None  # the row at the end of the sequence, one for each round
    _known: dict[int, tuple[Readout, float]]  # of the round of `_root`

    @classmethod
    def example(cls, shape: ModelShape) -> Example:
        """See `Part.example`."""
        return Example(kind=cls.name, head=AcceptanceHead(shape.width), roles=("small", "large"))

    def use(self, artifact: Artifact) -> None:
        """See `TrainedLength.use`."""
        self._head = AcceptanceHead.of(artifact)

    def continues(self, path: Path[Step]) -> bool:
        """Return whether all tokens but the last are still likely to be accepted together."""
        if path[0].row is not self._root:
            self._root, self._known = path[0].row, {}
        accepted = 1.0
        for step in path[1:]:  # a step's row was read at the token before it; the first one's is the sequence's last
            accepted *= self._acceptance(step.row)
        return len(path) < self.params.least or 1.0 - accepted <= self.params.threshold

    def observe(self, draft: DraftTree, verdict: VerifyResult, seconds: float) -> None:
        """Trained beforehand: nothing to learn."""

    def _acceptance(self, row: Readout) -> float:
        """Return the head's reading of a row, made once a round; rows are kept until its end, for their identity."""
        known = self._known.get(id(row))
        if known is None:
            known = self._known[id(row)] = (row, self._head.probability(row.hidden[LAST]))
        return known[1]


PART = SpecDecPlusPlusLength
