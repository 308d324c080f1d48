"""N-best reranking: a weighted sum of several values, such as the likelihood and a reward (paper #57)."""

from __future__ import annotations

import asyncio
from typing import Annotated

from pydantic import Field, FiniteFloat

from decoding.aggregators.base import AggregatorChoice, AnswerSet, ValuedAggregator, make_valued
from decoding.model import ModelPool, StopRule
from turnout.part_choice import PartChoice
from turnout.registry import MethodParams


class Term(MethodParams):
    """Term of the sum.

    Attributes:
        part: whose values are added.
        weight: their factor.
    """

    part: Annotated[AggregatorChoice, Field(description="an aggregator that gives values")]
    weight: Annotated[FiniteFloat, Field(ge=-1e6, le=1e6)] = 1.0


class NBestParams(MethodParams):
    """Parameters of `nbest`."""

    terms: Annotated[
        tuple[Term, ...],
        Field(min_length=1, max_length=8, description="what is summed; `training.nbest` tunes the weights"),
    ] = (Term(part=PartChoice(name="logprob")),)


class NBest(ValuedAggregator):
    """Paper #57 (Quality-Aware Decoding), fixed and tuned reranking: the greatest sum of weight times value.

    With one term of weight 1 it is that aggregator alone.
    """

    Params = NBestParams
    params: NBestParams
    papers = (57,)
    score = "weighted sum of the values of `terms`"

    def __init__(self, params: NBestParams | None = None) -> None:
        super().__init__(params)
        terms = enumerate(self.params.terms)
        self._parts = [make_valued(term.part, f"{self.where}.terms.{place}.part") for place, term in terms]

    @property
    def over_text(self) -> bool:
        """See `Aggregator.over_text`."""
        return all(part.over_text for part in self._parts)

    @property
    def reads_logprobs(self) -> bool:  # type: ignore[override]
        """See `Aggregator.reads_logprobs`."""
        return any(part.reads_logprobs for part in self._parts)

    def check(self, models: ModelPool) -> None:
        """See `Part.check`."""
        for part in self._parts:
            part.check(models)

    def rule(self) -> StopRule | None:
        """See `Aggregator.rule`: of the first term that has one."""
        return next((rule for part in self._parts if (rule := part.rule()) is not None), None)

    async def values(self, group: AnswerSet) -> list[float]:
        """See `ValuedAggregator.values`."""
        found = await asyncio.gather(*(part.values(group) for part in self._parts))
        weights = [term.weight for term in self.params.terms]
        return [sum(w * v for w, v in zip(weights, row, strict=True)) for row in zip(*found, strict=True)]


PART = NBest
