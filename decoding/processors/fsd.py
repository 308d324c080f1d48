"""FSD, n-gram form: top candidates by probability less an anti-model of the text so far (paper #84)."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field, FiniteFloat

from decoding.processors._own_text import Candidates, Continuations
from decoding.processors.base import Batch, LogitsProcessor, Stage
from decoding.row_context import RowContext
from turnout.registry import MethodParams


class FsdParams(MethodParams):
    """Parameters."""

    alpha: Annotated[FiniteFloat, Field(ge=0.0, le=1.0, description="weight of the anti-model; 0 is off")] = 0.6
    k: Annotated[int, Field(ge=1, le=256, description="candidates: the most probable tokens")] = 6
    n: Annotated[int, Field(ge=1, le=8, description="longest n-gram of the anti-model")] = 3
    beta: Annotated[FiniteFloat, Field(ge=0.0, le=1.0, description="share that a longer n-gram takes")] = 0.9


class Fsd(LogitsProcessor):
    """Frustratingly Simple Decoding (paper #84): (1 - alpha) p(v) - alpha w(v) over the top k of p.

    w is the probability of v in a smoothed n-gram model of prompt and answer. From the longest context down, a context
    that v never followed is passed over; else it takes the share `beta` of what is left (all of it, at the unigram):
    count / (total + 1), at the unigram count / total. A search: for greedy requests.
    """

    Params = FsdParams
    params: FsdParams
    papers = (84,)
    stage = Stage.TRUNCATE
    greedy_only = True
    off: ClassVar = {"alpha": 0.0}

    def __init__(self, params: Any = None) -> None:
        super().__init__(params)
        self._text = Continuations(self.params.n)

    @classmethod
    def apply(cls, logits: torch.Tensor, parts: Rows[Self], batch: Batch) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        alpha = batch.tensor([part.params.alpha for part in parts])
        top = Candidates.of(logits, [part.params.k for part in parts], batch)
        weights = [
            weight
            for part, context, tokens in zip(parts, batch.contexts, top.tokens, strict=True)
            for weight in part.anti_probabilities(context, tokens)
        ]
        share = top.of_rows(alpha)
        scores = (1 - share) * top.probs - share * torch.tensor(weights, device=logits.device)
        return top.rerank(logits, scores, alpha > 0)

    def anti_probabilities(self, context: RowContext, tokens: list[int]) -> list[float]:
        """w of each of the tokens at a row."""
        counts = [(each, sum(each.values())) for each in self._text.at(context)]
        return [self._weight(token, counts) for token in tokens]

    def _weight(self, token: int, counts: list[tuple[dict[int, int], int]]) -> float:
        weight, rest = 0.0, 1.0
        for size in range(len(counts) - 1, -1, -1):
            followers, total = counts[size]
            count = followers.get(token, 0)
            if not count:
                continue
            if size == 0:
                weight += rest * count / total
            else:
                weight += rest * self.params.beta * count / (total + 1)
                rest *= 1 - self.params.beta
        return weight


PART = Fsd
