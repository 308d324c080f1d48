"""Majority vote: an answer with the most common final answer, the likeliest of these."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Items
from typing import Annotated

from pydantic import Field

from decoding.aggregators.base import LIKELIHOOD, Aggregator, AnswerSet, Candidate, best
from turnout.registry import MethodParams


class MajorityParams(MethodParams):
    """Parameters of `majority`."""

    early: Annotated[
        bool,
        Field(description="whether to end the answers still being written once no final answer can get more votes"),
    ] = False


class Majority(Aggregator):
    """Self-consistency (Wang et al. 2023): each answer votes for its final answer; the likeliest voter is shown."""

    Params = MajorityParams
    params: MajorityParams
    score = LIKELIHOOD

    @property
    def over_text(self) -> bool:
        """See `Aggregator.over_text`."""
        return True

    @property
    def stops_early(self) -> bool:  # type: ignore[override]
        """See `Aggregator.stops_early`."""
        return self.params.early

    def decided(self, ended: Items[Candidate], waiting: int) -> bool:
        """True once the first is further ahead of the second than there are votes to come."""
        votes = [count for answer, count in Counter(each.final for each in ended).most_common() if answer]
        return bool(votes) and votes[0] > sum(votes[1:2]) + waiting

    async def choose(self, group: AnswerSet) -> int:
        """See `Aggregator.choose`."""
        group.scores, group.votes = known(group.likelihoods), [1.0] * len(group.answers)
        return most_voted(group.likelihoods, [each.final for each in group.answers])


def known(likelihoods: list[float]) -> list[float] | None:
    """Return likelihoods as scores; None where one of them is unknown."""
    return likelihoods if all(map(math.isfinite, likelihoods)) else None


def most_voted(values: Items[float], answers: Items[str]) -> int:
    """Return the place of the best of those with the most common final answer; of equal ones the first.

    Args:
        values: how good each is.
        answers: the final answer of each; one that says nothing wins only if all do.
    """
    votes = Counter(answer for answer in answers if answer) or Counter(answers)
    most = max(votes.values())
    places = [place for place, answer in enumerate(answers) if votes[answer] == most]
    return places[best([values[place] for place in places])]


PART = Majority
