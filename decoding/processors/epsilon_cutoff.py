"""Epsilon cut-off: tokens with at least that probability (Hewitt et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, FiniteFloat

from decoding.processors.base import Batch, LogitsProcessor, Stage, keep_from
from turnout.registry import MethodParams


class EpsilonCutoffParams(MethodParams):
    """Parameters."""

    epsilon: Annotated[FiniteFloat, Field(ge=0.0, lt=1.0, description="least probability; 0 is off")] = 3e-4


class EpsilonCutoff(LogitsProcessor):
    """See the module."""

    Params = EpsilonCutoffParams
    params: EpsilonCutoffParams
    stage = Stage.TRUNCATE
    reads_values = True
    keeps_best = True
    off: ClassVar = {"epsilon": 0.0}

    @classmethod
    def apply(cls, logits: torch.Tensor, parts: Rows[Self], batch: Batch) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        return keep_from(logits, logits.softmax(-1), batch.tensor([part.params.epsilon for part in parts]))


PART = EpsilonCutoff
