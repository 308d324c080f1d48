"""First finish: the answer that ends first; the others are cancelled (paper #155)."""

from __future__ import annotations

from collections.abc import Sequence as Items

from decoding.aggregators.base import Aggregator, AnswerSet, Candidate


class FirstFinish(Aggregator):
    """Paper #155 (First Finish Search): short traces are more often right, and the shortest costs least.

    Answers that end in the same step: the shortest, of equally long ones the likeliest. No votes are counted, and
    nothing is scored. It is of no use where long traces are the right ones.
    """

    papers = (155,)
    score = "minus the number of tokens"
    stops_early = True

    def decided(self, ended: Items[Candidate], waiting: int) -> bool:
        """See `Aggregator.decided`."""
        return True

    async def choose(self, group: AnswerSet) -> int:
        """See `Aggregator.choose`."""
        answers = group.answers
        group.scores = [-float(len(each.ids)) for each in answers]
        return min(range(len(answers)), key=lambda place: (len(answers[place].ids), -answers[place].mean_logprob))


PART = FirstFinish
