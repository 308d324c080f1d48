"""Minimum Bayes risk: the answer most similar to all the others (paper #57)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from decoding.aggregators._embeddings import embeddings
from decoding.aggregators.base import AnswerSet, ValuedAggregator, make_valued
from decoding.model import ModelPool, StopRule
from decoding.similarity import TextSimilarity, similarities
from turnout.part_choice import PartChoice
from turnout.registry import MethodParams

Utility = Literal["chrf", "token_f1", "rouge_l", "exact", "embedding"]


class MbrParams(MethodParams):
    """Parameters of `mbr`."""

    utility: Annotated[
        Utility,
        Field(
            description="similarity of two answers: chrf, of character n-grams; token_f1, of words; rouge_l, of word"
            " order; exact, whether final answers are equal; embedding, the cosine of the model's own embeddings"
        ),
    ] = "chrf"
    first: Annotated[
        PartChoice | None,
        Field(
            description="what first finds the best `keep` answers, by its values; absent: all stay",
            json_schema_extra={"x-slot": "aggregators"},
        ),
    ] = None
    keep: Annotated[int, Field(ge=1, le=64, description="answers that `first` leaves to choose from")] = 4
    support: Annotated[
        Literal["all", "kept"], Field(description="which answers the expected utility is taken over")
    ] = "all"


class Mbr(ValuedAggregator):
    """Paper #57 (Quality-Aware Decoding), minimum Bayes risk over a sampled set, and its two-stage form.

    Value of an answer y: the mean of u(y, y') over the support, itself included: an unbiased estimate, up to that one
    term, of its expected utility under the model's law. Of equal values the likelier answer is shown. With
    `utility: exact` it is a majority vote; with `keep` at the number of answers, `first` changes nothing.
    """

    Params = MbrParams
    params: MbrParams
    papers = (57,)
    score = "expected utility: mean similarity to the other answers; -1: left out by `first`"

    def __init__(self, params: MbrParams | None = None) -> None:
        super().__init__(params)
        first = self.params.first
        self._first = make_valued(first, f"{self.where}.first") if first is not None else None

    @property
    def over_text(self) -> bool:
        """See `Aggregator.over_text`."""
        return self.params.utility != "embedding" and (self._first is None or self._first.over_text)

    @property
    def reads_logprobs(self) -> bool:  # type: ignore[override]
        """See `Aggregator.reads_logprobs`."""
        return self._first is not None and self._first.reads_logprobs

    def check(self, models: ModelPool) -> None:
        """See `Part.check`."""
        if self._first is not None:
            self._first.check(models)

    def rule(self) -> StopRule | None:
        """See `Aggregator.rule`."""
        return self._first.rule() if self._first is not None else None

    async def values(self, group: AnswerSet) -> list[float]:
        """Expected utility of each answer; -1 of those that `first` leaves out."""
        count = len(group.answers)
        kept = list(range(count))
        if self._first is not None and self.params.keep < count:
            scores = await self._first.values(group)
            kept = sorted(sorted(kept, key=lambda place: -scores[place])[: self.params.keep])
        support = kept if self.params.support == "kept" else list(range(count))
        matrix = await self._utilities(group, kept, support)
        values = [-1.0] * count
        for place, row in zip(kept, matrix, strict=True):
            values[place] = sum(row) / len(support)
        return values

    async def _utilities(self, group: AnswerSet, kept: list[int], support: list[int]) -> list[list[float]]:
        """Utility of each answer kept to each of the support."""
        kind = self.params.utility
        if kind == "embedding":
            seq, model, _ = group.context
            vectors = await embeddings(model, seq, [each.ids for each in group.answers])
            cosines: list[list[float]] = (vectors[kept] @ vectors[support].T).tolist()
            return cosines
        similarity: TextSimilarity = kind
        texts = [each.final if kind == "exact" else each.text for each in group.answers]
        return await similarities([texts[place] for place in kept], [texts[place] for place in support], similarity)

    async def choose(self, group: AnswerSet) -> int:
        """See `Aggregator.choose`."""
        values, likely = await self.values(group), group.likelihoods
        group.scores = values
        chosen = max(range(len(values)), key=lambda place: (values[place], likely[place]))
        group.measures["expected_utility"] = values[chosen]
        return chosen


PART = Mbr
