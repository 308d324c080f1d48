"""Judging a candidate that was drawn while the target read what stands before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.lengths.base import LengthPolicy
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.rejection import RejectionVerifier
from turnout.types import Token

if TYPE_CHECKING:
    from decoding.model import Model
    from decoding.verifiers.base import VerifyResult


class LateCandidate(Drafter):
    """Pre-verification: a rejection verifier's test, run next to the target on its last forward (paper #130, PEARL).

    A part that drafts nothing: `teach` brings the candidate, with the distribution it was drawn from, and the verdict
    of that forward, all of whose nodes were accepted; neither that distribution nor the target's passes through
    the caller. `propose` then only fetches the outcome.

    Attributes:
        token: what stands at the candidate's place now: the candidate, or what the target has in its place.
        accepted: whether it is the candidate.
    """

    runs_on = "large"
    kinds = frozenset({Candidates.DRAWN})
    changing = ("token", "accepted")

    def __init__(self) -> None:
        super().__init__()
        self.token: Token | None = None
        self.accepted = False

    def observe(self, model: Model, seq: Sequence, draft: DraftTree, verdict: VerifyResult) -> None:
        """Judge the draft's one node, or draw from the target's own distribution where it has none.

        Args:
            model: the target.
            seq: what the candidate continues.
            draft: the candidate.
            verdict: of a round that ended with the sequence's last token; its last row was read there.
        """
        verifier = RejectionVerifier()
        verifier.open_end = len(draft) > 0
        judged = verifier.judge(seq, draft, [verdict.rows[-1]], model.name)
        [self.token] = judged.tokens
        self.accepted = bool(judged.path)

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """Nothing."""
        return DraftTree.empty(model.name)
