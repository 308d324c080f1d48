"""Dynamic temperature: low where the entropy is low, high where it is high (as in llama.cpp and vLLM plug-ins)."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, FiniteFloat, model_validator

from decoding.processors.base import Batch, LogitsProcessor, Stage, remaining, row_entropy
from turnout.errors import FieldError
from turnout.registry import MethodParams


class DynamicTemperatureParams(MethodParams):
    """Parameters."""

    low: Annotated[FiniteFloat, Field(gt=0.0, le=10.0, description="temperature where there is no doubt")] = 0.5
    high: Annotated[FiniteFloat, Field(gt=0.0, le=10.0, description="temperature where all tokens are equal")] = 1.5
    exponent: Annotated[FiniteFloat, Field(gt=0.0, le=10.0, description="of the entropy's share of the greatest")] = 1.0

    @model_validator(mode="after")
    def _check_order(self) -> DynamicTemperatureParams:
        if self.low > self.high:
            raise FieldError("low", f"must be at most high, {self.high} (got {self.low})")
        return self


class DynamicTemperature(LogitsProcessor):
    """See the module: low + (high - low) * (H / ln n) ** exponent, with n tokens not excluded."""

    Params = DynamicTemperatureParams
    params: DynamicTemperatureParams
    stage = Stage.TEMPERATURE
    reads_values = True
    keeps_best = True
    off: ClassVar = {"low": 1.0, "high": 1.0}

    @classmethod
    def apply(cls, logits: torch.Tensor, parts: Rows[Self], batch: Batch) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        low = batch.tensor([part.params.low for part in parts])
        high = batch.tensor([part.params.high for part in parts])
        exponent = batch.tensor([part.params.exponent for part in parts])
        greatest = remaining(logits).clamp(min=2).log()
        share: torch.Tensor = (row_entropy(logits.softmax(-1)) / greatest).clamp(0.0, 1.0) ** exponent
        return logits / (low + (high - low) * share)


PART = DynamicTemperature
