"""Momentum decoding: candidates that would walk a seen path of the text further are resisted (paper #172)."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field, FiniteFloat

from decoding.processors._own_text import Candidates, Continuations
from decoding.processors.base import Batch, LogitsProcessor, Stage
from decoding.row_context import RowContext
from turnout.registry import MethodParams


class MomentumParams(MethodParams):
    """Parameters."""

    alpha: Annotated[FiniteFloat, Field(ge=0.0, le=10.0, description="weight of the resistance; 0 is off")] = 0.2
    k: Annotated[int, Field(ge=1, le=256, description="candidates: the most probable tokens")] = 5
    resistance: Annotated[
        tuple[Annotated[FiniteFloat, Field(ge=0.0)], ...],
        Field(
            min_length=2, max_length=17,
            description="of a token not seen, one seen, one that repeats 2 tokens, 3, ...; longer: as the last",
        ),
    ] = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)  # fmt: skip


class Momentum(LogitsProcessor):
    """Momentum decoding (paper #172): p(v) - alpha f(r(v)) over the top k of p.

    r is 0 where v does not occur in prompt and answer, else the length of the longest run of tokens, v the last of
    them, that occurred before: the depth of the circle that v would continue. An unseen best token always wins. A
    search: for greedy requests.
    """

    Params = MomentumParams
    params: MomentumParams
    papers = (172,)
    stage = Stage.TRUNCATE
    greedy_only = True
    off: ClassVar = {"alpha": 0.0}

    def __init__(self, params: Any = None) -> None:
        super().__init__(params)
        self._text = Continuations(len(self.params.resistance) - 1)

    @classmethod
    def apply(cls, logits: torch.Tensor, parts: Rows[Self], batch: Batch) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        alpha = batch.tensor([part.params.alpha for part in parts])
        top = Candidates.of(logits, [part.params.k for part in parts], batch)
        resistance = [
            part.params.resistance[depth]
            for part, context, tokens in zip(parts, batch.contexts, top.tokens, strict=True)
            for depth in part.depths(context, tokens)
        ]
        scores = top.probs - top.of_rows(alpha) * torch.tensor(resistance, device=logits.device)
        return top.rerank(logits, scores, alpha > 0)

    def depths(self, context: RowContext, tokens: list[int]) -> list[int]:
        """r of each of the tokens at a row."""
        seen = self._text.at(context)
        return [
            max((size + 1 for size, followers in enumerate(seen) if token in followers), default=0) for token in tokens
        ]


PART = Momentum
