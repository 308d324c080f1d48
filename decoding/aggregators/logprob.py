"""The answer with the highest mean log-probability of its tokens."""

from __future__ import annotations

from decoding.aggregators.base import LIKELIHOOD, AnswerSet, ValuedAggregator


class LogProb(ValuedAggregator):
    """Length-normalised likelihood; a value is the mean log-probability of the tokens, nats."""

    reads_logprobs = True
    score = LIKELIHOOD

    @property
    def over_text(self) -> bool:
        """See `Aggregator.over_text`."""
        return True

    async def values(self, group: AnswerSet) -> list[float]:
        """See `ValuedAggregator.values`."""
        return group.likelihoods


PART = LogProb
