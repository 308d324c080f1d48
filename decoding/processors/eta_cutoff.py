"""Eta cut-off: as epsilon, with a lower threshold where the entropy is high (Hewitt et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, FiniteFloat

from decoding.processors.base import Batch, LogitsProcessor, Stage, keep_from, row_entropy
from turnout.registry import MethodParams


class EtaCutoffParams(MethodParams):
    """Parameters."""

    epsilon: Annotated[FiniteFloat, Field(ge=0.0, lt=1.0, description="0 is off; 3e-4 to 2e-3 are usual")] = 3e-4


class EtaCutoff(LogitsProcessor):
    """See the module: eta = min(epsilon, sqrt(epsilon) * exp(-entropy in nats))."""

    Params = EtaCutoffParams
    params: EtaCutoffParams
    stage = Stage.TRUNCATE
    reads_values = True
    keeps_best = True
    off: ClassVar = {"epsilon": 0.0}

    @classmethod
    def apply(cls, logits: torch.Tensor, parts: Rows[Self], batch: Batch) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        epsilon = batch.tensor([part.params.epsilon for part in parts])
        probs = logits.softmax(-1)
        return keep_from(logits, probs, torch.minimum(epsilon, epsilon.sqrt() * (-row_entropy(probs)).exp()))


PART = EtaCutoff
