"""Proxy tuning: a large model moved by what tuning changed in a small one (Liu et al. 2024)."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field, FiniteFloat

from decoding.contrast.base import Contrast, Stream, StreamRows
from decoding.model import Model, ModelPool
from turnout.registry import MethodParams, ModelRole


class ProxyTuningParams(MethodParams):
    """Parameters."""

    example: ClassVar = {"expert": "small", "anti_expert": "large"}

    expert: Annotated[ModelRole, Field(description="role of the tuned small model")] = "expert"
    anti_expert: Annotated[ModelRole, Field(description="role of the same model before it was tuned")] = "anti_expert"
    alpha: Annotated[FiniteFloat, Field(ge=0.0, le=100.0, description="0 is off, 1 as in the paper")] = 1.0


class ProxyTuning(Contrast):
    """See the module: logits + alpha * (logits of the expert - logits of the anti-expert)."""

    Params = ProxyTuningParams
    params: ProxyTuningParams
    off: ClassVar = {"alpha": 0.0}

    def streams(self, models: ModelPool, model: Model) -> tuple[Stream, ...]:
        """See `Contrast.streams`."""
        return Stream(role=self.params.expert), Stream(role=self.params.anti_expert)

    def combine(self, logits: torch.Tensor, rows: StreamRows) -> torch.Tensor:
        """See `Contrast.combine`."""
        return logits[:, 0] + self.params.alpha * (logits[:, 1] - logits[:, 2])


PART = ProxyTuning
