"""Complexity vote: a majority vote among the answers with the most reasoning steps alone (paper #120)."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from pydantic import Field

from decoding.aggregators.base import Aggregator, AnswerSet
from decoding.aggregators.majority import most_voted
from turnout.registry import MethodParams

STEP_ENDS = {"line": re.compile(r"\n+"), "sentence": re.compile(r"(?<=[.!?])\s+|\n+")}
Step = Literal["line", "sentence"]


class ComplexityParams(MethodParams):
    """Parameters of `complexity`."""

    keep: Annotated[
        int | None, Field(ge=1, le=64, description="answers that vote; absent: three quarters of them, rounded up")
    ] = None
    step: Annotated[Step, Field(description="what is counted: lines or sentences that say something")] = "line"


class Complexity(Aggregator):
    """Paper #120 (Complexity-Based Prompting), its vote: the `keep` answers with the most steps vote.

    Steps are counted in all that was written, thinking included. Of equally long answers the likelier comes first.
    With `keep` at the number of answers it is `majority`, with 1 the longest answer.
    """

    Params = ComplexityParams
    params: ComplexityParams
    papers = (120,)
    score = "reasoning steps"

    @property
    def over_text(self) -> bool:
        """See `Aggregator.over_text`."""
        return True

    async def choose(self, group: AnswerSet) -> int:
        """See `Aggregator.choose`."""
        answers, likelihoods = group.answers, group.likelihoods
        steps = [num_steps(each.whole, self.params.step) for each in answers]
        order = sorted(range(len(answers)), key=lambda place: (-steps[place], -likelihoods[place]))
        kept = sorted(order[: self.params.keep or math.ceil(0.75 * len(answers))])
        group.scores = [float(each) for each in steps]
        group.votes = [float(place in kept) for place in range(len(answers))]
        return kept[most_voted([likelihoods[place] for place in kept], [answers[place].final for place in kept])]


def num_steps(text: str, step: Step = "line") -> int:
    """Return how many lines or sentences of a text are not blank."""
    return sum(1 for each in STEP_ENDS[step].split(text) if each.strip())


PART = Complexity
