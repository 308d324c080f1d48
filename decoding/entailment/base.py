"""The slot of entailment judges: whether one answer to a question implies another.

A module here assigns its class to `PART`; estimators of uncertainty choose it by file name.
"""

from __future__ import annotations

import asyncio
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
        """Return whether each implies the other; equal texts do, and are not judged."""
        if first.text == second.text:
            return True
        if self.symmetric:
            return await self.entails(group, first, second)
        forth, back = await asyncio.gather(self.entails(group, first, second), self.entails(group, second, first))
        return forth and back


async def clusters_of(judge: EntailmentJudge, group: AnswerSet) -> list[int]:
    """Cluster answers greedily: one joins the first cluster whose first member it is equivalent to.

    Returns:
        The cluster of each answer, numbered as they come.
    """
    firsts: list[Candidate] = []
    found: list[int] = []
    for answer in group.answers:
        for cluster, first in enumerate(firsts):
            if await judge.equivalent(group, first, answer):
                found.append(cluster)
                break
        else:
            found.append(len(firsts))
            firsts.append(answer)
    return found


def sizes_of(clusters: Items[int]) -> list[int]:
    """Return the number of members of each cluster."""
    return [list(clusters).count(cluster) for cluster in range(max(clusters) + 1)]
