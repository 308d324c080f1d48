"""Contrastive decoding: what an expert finds likelier than an amateur, among plausible tokens (Li et al. 2023)."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field, FiniteFloat

from decoding.contrast.base import Contrast, Stream, StreamRows, outside, plausible
from decoding.model import Model, ModelPool
from turnout.registry import MethodParams, ModelRole


class ContrastiveParams(MethodParams):
    """Parameters."""

    amateur: Annotated[ModelRole, Field(description="role of the amateur")] = "small"
    weight: Annotated[FiniteFloat, Field(ge=0.0, le=10.0, description="of the amateur; 0 with alpha 0 is off")] = 1.0
    alpha: Annotated[
        FiniteFloat, Field(ge=0.0, le=1.0, description="share of the greatest probability that a token must have")
    ] = 0.1
    amateur_temperature: Annotated[FiniteFloat, Field(gt=0.0, le=100.0, description="of the amateur's law")] = 1.0


class Contrastive(Contrast):
    """See the module: log p(expert) - weight * log p(amateur), where p(expert) >= alpha * its greatest."""

    Params = ContrastiveParams
    params: ContrastiveParams
    off: ClassVar = {"weight": 0.0, "alpha": 0.0}

    def streams(self, models: ModelPool, model: Model) -> tuple[Stream, ...]:
        """See `Contrast.streams`."""
        return (Stream(role=self.params.amateur),)

    def combine(self, logits: torch.Tensor, rows: StreamRows) -> torch.Tensor:
        """See `Contrast.combine`."""
        params, expert = self.params, logits[:, 0].log_softmax(-1)
        amateur = (logits[:, 1] / params.amateur_temperature).log_softmax(-1)
        return outside(expert - params.weight * amateur, plausible(expert, params.alpha), expert)


PART = Contrastive
