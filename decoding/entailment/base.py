"""The slot of entailment judges: whether one answer to a question implies another.

A module here assigns its class to `PART`; estimators of uncertainty choose it by file name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Items
from typing import Annotated

from pydantic import Field

from decoding.aggregators.base import AnswerSet, Candidate
from decoding.parts import Part
from turnout.part_choice import PartChoice

PACKAGE = "decoding.entailment"

JudgeChoice = Annotated[PartChoice, Field(json_schema_extra={"x-slot": "entailment"})]


class EntailmentJudge(Part):
    """Judge of entailment between two answers to the request's question.

    Attributes:
        symmetric: whether one direction says the other.
    """

    where = "method.params.uncertainty.judge"
    symmetric: bool = False

    @abstractmethod
    async def entails(self, group: AnswerSet, first: Candidate, second: Candidate) -> bool:
        """Return whether the first answer implies the second, as answers to the question in `group`."""

    async def equivalent(self, group: AnswerSet, first: Candidate, second: Candidate) -> bool:
        """Return whether each implies the other; equal texts do, and are not judged.

        The second direction is judged only where the first one holds: most pairs of different answers cost one.
        """
        if first.text == second.text:
            return True
        return await self.entails(group, first, second) and (self.symmetric or await self.entails(group, second, first))


async def clusters_of(judge: EntailmentJudge, group: AnswerSet) -> list[int]:
    """Cluster answers greedily: one joins the first cluster whose first member it is equivalent to.

    Each different text is compared once, and with first members alone: n answers of d different texts in c clusters
    take at most c d comparisons.

    Returns:
        The cluster of each answer, numbered as they come.
    """
    firsts: list[Candidate] = []
    known: dict[str, int] = {}
    found: list[int] = []
    for answer in group.answers:
        cluster = known.get(answer.text)
        if cluster is None:
            cluster = len(firsts)
            for place, first in enumerate(firsts):
                if await judge.equivalent(group, first, answer):
                    cluster = place
                    break
            else:
                firsts.append(answer)
            known[answer.text] = cluster
        found.append(cluster)
    return found


def sizes_of(clusters: Items[int]) -> list[int]:
    """Return the number of members of each cluster."""
    return [list(clusters).count(cluster) for cluster in range(max(clusters) + 1)]
