"""Top-n-sigma: tokens whose logit is at most n standard deviations below the best (Tang et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, FiniteFloat

from decoding.processors.base import Batch, LogitsProcessor, Stage, keep, row_sums
from turnout.registry import MethodParams


class TopNSigmaParams(MethodParams):
    """Parameters."""

    n: Annotated[FiniteFloat, Field(ge=0.0, le=100.0, description="standard deviations; 0 is off")] = 1.0


class TopNSigma(LogitsProcessor):
    """See the module. The deviation is that of the logits not yet excluded; temperature changes nothing in it."""

    Params = TopNSigmaParams
    params: TopNSigmaParams
    stage = Stage.TRUNCATE
    keeps_best = True
    off: ClassVar = {"n": 0.0}

    @classmethod
    def apply(cls, logits: torch.Tensor, parts: Rows[Self], batch: Batch) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        n = batch.tensor([part.params.n for part in parts])
        finite = logits.isfinite()
        count = finite.sum(-1, keepdim=True)
        mean = row_sums(logits.where(finite, 0.0)) / count
        spread = (row_sums((logits - mean).where(finite, 0.0).square()) / count).sqrt()
        return keep(logits, (logits >= logits.amax(-1, keepdim=True) - n * spread) | (n == 0))


PART = TopNSigma
