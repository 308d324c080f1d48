"""Tail-free: sorted probabilities are cut where their curvature has been used up (Phénix and Egan 2019)."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, FiniteFloat

from decoding.processors.base import NEG_INF, Batch, LogitsProcessor, Stage, row_sums
from turnout.registry import MethodParams


class TailFreeParams(MethodParams):
    """Parameters."""

    z: Annotated[FiniteFloat, Field(gt=0.0, le=1.0, description="share of the curvature kept; 1 is off")] = 0.95


class TailFree(LogitsProcessor):
    """See the module. Tokens are kept while the normalised |second differences| before them sum to at most z."""

    Params = TailFreeParams
    params: TailFreeParams
    stage = Stage.TRUNCATE
    keeps_best = True
    off: ClassVar = {"z": 1.0}

    @classmethod
    def apply(cls, logits: torch.Tensor, parts: Rows[Self], batch: Batch) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        if logits.shape[-1] <= 2:
            return logits
        limits = batch.tensor([part.params.z for part in parts])
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        bend = ordered.softmax(-1).diff(dim=-1).diff(dim=-1).abs()
        total = row_sums(bend)
        share = torch.where(total > 1e-6, bend / total, 1.0 / bend.shape[-1]).cumsum(-1)
        # The token after a place where more than z is used up is the first one that goes; the best one stays.
        used = torch.nn.functional.pad(share[:, 1:] > limits, (1, 2))
        gone = (used.cumsum(-1) > 0) & (limits < 1.0)
        return logits.masked_fill(torch.zeros_like(gone).scatter(-1, order, gone), NEG_INF)


PART = TailFree
