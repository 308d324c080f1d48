"""Draft until the draft model's entropy says that acceptance is unlikely."""

from __future__ import annotations

import math
from collections.abc import Sequence as Path
from typing import Annotated

from pydantic import Field, FiniteFloat

from decoding.lengths._readings import entropy_nats
from decoding.lengths.base import Depth, LengthParams, LengthPolicy, Round, Step
from decoding.model import ReadSpec
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult


class SvipParams(LengthParams):
    """Parameters of `svip`. The defaults stop above 0.6 nats (0.87 bits)."""

    most: Depth = 40
    scale: Annotated[
        FiniteFloat, Field(gt=0, le=10, description="c of sqrt(c * entropy in nats), the bound on the rejection rate")
    ] = 0.15
    threshold: Annotated[
        FiniteFloat, Field(ge=0, le=1000, description="h: the draft ends below a token whose bound is larger")
    ] = 0.3


class SvipLength(LengthPolicy):
    """Self-verification length (paper #62, SVIP).

    A token drawn from q is accepted with probability 1 - TV(p, q) >= 1 - sqrt(KL(q || p) / 2); with the cross entropy
    taken as a multiple of H(q) this is at least 1 - sqrt(c H(q)). Drafting ends below the first token whose q has
    sqrt(c H(q)) > h, or that ends the text. H is the entropy of the whole
    distribution before temperature and top-p; where a structure holds, of the tokens it allows: 0 for a forced token,
    which is always accepted. The token itself stays in the draft, so the output law does not change.
    """

    Params = SvipParams
    params: SvipParams
    papers = (62,)
    stepwise = True
    want = ReadSpec(draw=None, entropy=True)
    changing = ("_ends",)
    _ends: frozenset[int] = frozenset()

    def before_round(self, round: Round) -> int:
        """As deep as allowed."""
        self._ends = round.seq.end_ids
        return self.params.most

    def continues(self, path: Path[Step]) -> bool:
        """Return whether the last token was sure enough, and no end."""
        token, row = path[-1].token, path[-1].row
        return token not in self._ends and math.sqrt(self.params.scale * entropy_nats(row)) <= self.params.threshold

    def observe(self, draft: DraftTree, verdict: VerifyResult, seconds: float) -> None:
        """Nothing is kept between rounds."""


PART = SvipLength
