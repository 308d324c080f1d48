"""Equality of final answers."""

from __future__ import annotations

from decoding.aggregators.base import AnswerSet, Candidate
from decoding.entailment.base import EntailmentJudge


class FinalAnswer(EntailmentJudge):
    """Two answers are equivalent if their final answers are the same, letters as small ones; nothing is asked."""

    symmetric = True

    async def entails(self, group: AnswerSet, first: Candidate, second: Candidate) -> bool:
        """See `EntailmentJudge.entails`."""
        return first.final == second.final


PART = FinalAnswer
