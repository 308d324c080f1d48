"""Top-n-sigma: tokens whose logit is at most n standard deviations below the best (Tang et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, FiniteFloat

from decoding.processors.base import NEG_INF, Batch, LogitsProcessor, Stage, keep_from, remaining, row_sums
from turnout.registry import MethodParams


class TopNSigmaParams(MethodParams):
    """Parameters."""

    n: Annotated[FiniteFloat, Field(ge=0.0, le=100.0, description="standard deviations; 0 is off")] = 1.0


class TopNSigma(LogitsProcessor):
    """See the module. The deviation is that of the logits not yet excluded; temperature changes nothing in it."""

    Params = TopNSigmaParams
    params: TopNSigmaParams
    stage = Stage.TRUNCATE
    reads_values = True
    keeps_best = True
    off: ClassVar = {"n": 0.0}

    @classmethod
    def apply(cls, logits: torch.Tensor, parts: Rows[Self], batch: Batch) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        n = batch.tensor([part.params.n for part in parts])
        count = remaining(logits)
        finite = None if bool((count == logits.shape[-1]).all()) else logits > NEG_INF
        mean = row_sums(logits if finite is None else logits.where(finite, 0.0)) / count
        apart = logits - mean
        spread = (row_sums((apart if finite is None else apart.where(finite, 0.0)).square()) / count).sqrt()
        floor = logits.amax(-1, keepdim=True) - n * spread
        return keep_from(logits, logits, floor.masked_fill(n == 0, NEG_INF))


PART = TopNSigma
