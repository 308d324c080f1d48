"""Draft until the draft model is unsure of its best token."""

from __future__ import annotations

from collections.abc import Sequence as Path
from typing import Annotated

from pydantic import Field, FiniteFloat

from decoding.lengths._readings import top_probability
from decoding.lengths.base import LengthParams, LengthPolicy, Step
from decoding.model import ReadSpec
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult


class ConfidenceParams(LengthParams):
    """Parameters of `confidence`."""

    threshold: Annotated[
        FiniteFloat,
        Field(ge=0, le=2, description="a draft ends below a token whose distribution has no token this probable"),
    ] = 0.7


class ConfidenceLength(LengthPolicy):
    """Top-1 probability against a threshold; the unsure token itself is still verified.

    The rule that papers #54 (CLaSp), #142 (DEL), #153 (SWIFT) and #157 (Kangaroo) share. It looks at the
    largest probability, not at the drawn token's. A threshold of 0 drafts to the full depth, one above 1 one token.
    """

    Params = ConfidenceParams
    params: ConfidenceParams
    papers = (54, 142, 153, 157)
    stepwise = True
    want = ReadSpec(draw=None, top=1)

    def continues(self, path: Path[Step]) -> bool:
        """Return whether the last token's distribution was sharp enough."""
        return top_probability(path[-1].row) >= self.params.threshold

    def observe(self, draft: DraftTree, verdict: VerifyResult, seconds: float) -> None:
        """Nothing is kept between rounds."""


PART = ConfidenceLength
