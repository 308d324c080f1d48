"""Min-p: tokens with at least so large a share of the greatest probability (Nguyen et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, FiniteFloat

from decoding.processors.base import Batch, LogitsProcessor, Stage, keep_from
from turnout.registry import MethodParams


class MinPParams(MethodParams):
    """Parameters."""

    p: Annotated[FiniteFloat, Field(ge=0.0, le=1.0, description="share of the top probability; 0 is off")] = 0.05


class MinP(LogitsProcessor):
    """See the module."""

    Params = MinPParams
    params: MinPParams
    stage = Stage.TRUNCATE
    reads_values = True
    keeps_best = True
    off: ClassVar = {"p": 0.0}

    @classmethod
    def apply(cls, logits: torch.Tensor, parts: Rows[Self], batch: Batch) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        floor = logits.amax(-1, keepdim=True) + batch.tensor([part.params.p for part in parts]).log()
        return keep_from(logits, logits, floor)


PART = MinP
