"""Temperature: logits divided by it; above 1 the distribution is flatter, below 1 sharper."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, FiniteFloat

from decoding.processors.base import Batch, LogitsProcessor, Stage
from turnout.registry import MethodParams

# Below it a temperature is as good as greedy, and float32 would soon hold neither it nor a logit divided by it.
LEAST_TEMPERATURE = 1e-6


class TemperatureParams(MethodParams):
    """Parameters."""

    example: ClassVar = {"temperature": 0.7}

    temperature: Annotated[FiniteFloat, Field(gt=0.0, le=10.0, description="1 is off")] = 1.0


class Temperature(LogitsProcessor):
    """See the module."""

    Params = TemperatureParams
    params: TemperatureParams
    stage = Stage.TEMPERATURE
    reads_values = True
    keeps_best = True
    off: ClassVar = {"temperature": 1.0}

    @classmethod
    def apply(cls, logits: torch.Tensor, parts: Rows[Self], batch: Batch) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        return logits / batch.tensor([max(part.params.temperature, LEAST_TEMPERATURE) for part in parts])


PART = Temperature
