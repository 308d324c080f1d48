"""Self-certainty: votes for final answers weighted by how far the model's laws were from uniform (paper #215)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Items
from typing import Annotated

from pydantic import Field, FiniteFloat

from decoding.aggregators.base import AnswerSet, ValuedAggregator, best
from decoding.model import Decision, Readout, ReadSpec
from decoding.state import Stateful
from turnout.registry import MethodParams


class SelfCertaintyParams(MethodParams):
    """Parameters of `self_certainty`."""

    vote: Annotated[
        bool, Field(description="whether answers vote for their final answer; otherwise the most certain is shown")
    ] = True
    exponent: Annotated[
        FiniteFloat,
        Field(ge=0.0, le=100.0, description="of a vote (n - rank + 1)^exponent; 0: all votes count the same"),
    ] = 0.3


class CertaintyRule(Stateful):
    """Sum of the certainty of each row that a token was drawn from; ends nothing.

    Attributes:
        total: nats.
        count: tokens.
    """

    name = "certainty"
    want = ReadSpec(draw=None, certainty=True)
    changing = ("total", "count")

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0

    def observe(self, token: int, row: Readout) -> Decision:
        """Add the row."""
        assert row.certainty is not None
        self.total += row.certainty
        self.count += 1
        return Decision.GO_ON

    @property
    def mean(self) -> float:
        """Self-certainty of the answer, nats."""
        return self.total / self.count if self.count else 0.0


class SelfCertainty(ValuedAggregator):
    """Paper #215 (self-certainty and Borda voting).

    Self-certainty is the mean over an answer's tokens of KL(uniform || p), p the raw law over the whole vocabulary.
    The n answers are ranked by it, and each votes for its final answer with weight (n - rank + 1)^exponent; of the
    winner's answers the most certain is shown. Exponent 0 is a majority vote, a great one shows the most certain.
    """

    Params = SelfCertaintyParams
    params: SelfCertaintyParams
    papers = (215,)
    score = "self-certainty, nats"

    def rule(self) -> CertaintyRule:
        """See `Aggregator.rule`."""
        return CertaintyRule()

    async def values(self, group: AnswerSet) -> list[float]:
        """Self-certainty of each answer, nats."""
        return [each.rule.mean for each in group.answers if isinstance(each.rule, CertaintyRule)]

    async def choose(self, group: AnswerSet) -> int:
        """See `Aggregator.choose`."""
        values = await self.values(group)
        finals = [each.final for each in group.answers]
        chosen = borda(values, finals, self.params.exponent) if self.params.vote else best(values)
        group.scores = values
        group.votes = borda_votes(values, self.params.exponent) if self.params.vote else None
        group.measures["self_certainty"] = values[chosen]
        return chosen


def borda_votes(values: Items[float], exponent: float) -> list[float]:
    """Return the weight of each one's vote: the best of n has n^exponent, the last 1."""
    order = sorted(range(len(values)), key=lambda place: -values[place])
    weights = [0.0] * len(values)
    for rank, place in enumerate(order):
        weights[place] = float(len(values) - rank) ** exponent
    return weights


def borda(values: Items[float], answers: Items[str], exponent: float) -> int:
    """Return the place of the best of those whose final answer gets the most weight.

    Args:
        values: how good each is.
        answers: the final answer of each; one that says nothing wins only if all do.
        exponent: of the weight of a vote.
    """
    order = sorted(range(len(values)), key=lambda place: -values[place])
    votes: dict[str, float] = defaultdict(float)
    weights = borda_votes(values, exponent)
    for place in order:
        votes[answers[place]] += weights[place]
    named = {answer: weight for answer, weight in votes.items() if answer} or votes
    return max((place for place in order if answers[place] in named), key=lambda place: named[answers[place]])


PART = SelfCertainty
