"""Repetition penalty: logits of tokens of prompt and answer divided (positive) or multiplied by it (CTRL, 2019)."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, FiniteFloat

from decoding.processors._cells import Cells
from decoding.processors._counts import answer_counts
from decoding.processors.base import Batch, LogitsProcessor, Stage
from turnout.registry import MethodParams


class RepetitionPenaltyParams(MethodParams):
    """Parameters."""

    penalty: Annotated[FiniteFloat, Field(gt=0.0, le=10.0, description="1 is off; above it repeats are rarer")] = 1.1


class RepetitionPenalty(LogitsProcessor):
    """See the module."""

    Params = RepetitionPenaltyParams
    params: RepetitionPenaltyParams
    stage = Stage.PENALTY
    off: ClassVar = {"penalty": 1.0}

    @classmethod
    def apply(cls, logits: torch.Tensor, parts: Rows[Self], batch: Batch) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        seen = [dict.fromkeys(each.seq.prompt_set | answer_counts(each).keys(), 0.0) for each in batch.contexts]
        cells = Cells.of(seen, logits)
        penalty = cells.of_rows([part.params.penalty for part in parts])
        value = logits[cells.places]
        return logits.index_put(cells.places, torch.where(value > 0, value / penalty, value * penalty))


PART = RepetitionPenalty
