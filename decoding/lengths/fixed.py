"""Drafts of one length."""

from __future__ import annotations

from decoding.lengths.base import Depth, LengthParams, LengthPolicy
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult


class FixedParams(LengthParams):
    """Parameters of `fixed`."""

    most: Depth = 4


class FixedLength(LengthPolicy):
    """As deep as the drafter can, up to a fixed depth (paper #111, Speculative decoding)."""

    Params = FixedParams
    papers = (111,)

    def observe(self, draft: DraftTree, verdict: VerifyResult, seconds: float) -> None:
        """Nothing to learn."""


PART = FixedLength
