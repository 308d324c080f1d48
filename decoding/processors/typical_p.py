"""Typical-p: tokens whose surprise is closest to the entropy, to that much probability (Meister et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, FiniteFloat

from decoding.processors.base import NEG_INF, Batch, LogitsProcessor, Stage, row_entropy
from turnout.registry import MethodParams


class TypicalPParams(MethodParams):
    """Parameters."""

    p: Annotated[FiniteFloat, Field(gt=0.0, le=1.0, description="probability kept; 1 is off")] = 0.9


class TypicalP(LogitsProcessor):
    """See the module. It may leave out the most probable token, also of greedy rows."""

    Params = TypicalPParams
    params: TypicalPParams
    stage = Stage.TRUNCATE
    reads_values = True
    off: ClassVar = {"p": 1.0}

    @classmethod
    def apply(cls, logits: torch.Tensor, parts: Rows[Self], batch: Batch) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        limits = batch.tensor([part.params.p for part in parts])
        logp = logits.log_softmax(-1)
        entropy = row_entropy(logp.exp())
        order = (-logp - entropy).abs().argsort(dim=-1, stable=True)
        mass = logp.gather(-1, order).exp()
        inside = (mass.cumsum(-1) - mass < limits) | (limits >= 1.0)
        return logits.masked_fill(~torch.zeros_like(inside).scatter(-1, order, inside), NEG_INF)


PART = TypicalP
