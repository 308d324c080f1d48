"""Presence and frequency penalties: subtracted once for each token written, and once for each time it was."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, FiniteFloat

from decoding.processors._cells import Cells
from decoding.processors._counts import answer_counts
from decoding.processors.base import Batch, LogitsProcessor, Stage
from turnout.registry import MethodParams


class CountPenaltiesParams(MethodParams):
    """Parameters."""

    example: ClassVar = {"presence": 0.5, "frequency": 0.2}

    presence: Annotated[FiniteFloat, Field(ge=-2.0, le=2.0, description="subtracted once per token written")] = 0.0
    frequency: Annotated[FiniteFloat, Field(ge=-2.0, le=2.0, description="subtracted per time it was written")] = 0.0


class CountPenalties(LogitsProcessor):
    """See the module."""

    Params = CountPenaltiesParams
    params: CountPenaltiesParams
    stage = Stage.PENALTY
    off: ClassVar = {"presence": 0.0, "frequency": 0.0}

    @classmethod
    def apply(cls, logits: torch.Tensor, parts: Rows[Self], batch: Batch) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        cells = Cells.of([answer_counts(each) for each in batch.contexts], logits)
        presence = cells.of_rows([part.params.presence for part in parts])
        frequency = cells.of_rows([part.params.frequency for part in parts])
        return logits.index_put(cells.places, -(presence + frequency * cells.values), accumulate=True)


PART = CountPenalties
