"""Classifier-free guidance: away from what a negative prompt, or no prompt, makes likely (Sanchez et al. 2023)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field, FiniteFloat

from decoding.contrast.base import Asked, Contrast, Stream, StreamRows
from decoding.model import Model, ModelPool
from turnout.registry import MethodParams

NEGATIVE = "negative"


class CfgParams(MethodParams):
    """Parameters."""

    scale: Annotated[
        FiniteFloat, Field(ge=0.0, le=100.0, description="1 is off, above it is away from the negative prompt")
    ] = 1.5
    negative_prompt: Annotated[
        str,
        Field(max_length=100_000, description="stands in place of context and prompt, or of the last user message"),
    ] = ""


class Cfg(Contrast):
    """See the module: log p(negative) + scale * (log p - log p(negative))."""

    Params = CfgParams
    params: CfgParams
    off: ClassVar = {"scale": 1.0}

    def prompts(self, asked: Asked) -> dict[str, Asked]:
        """See `Contrast.prompts`."""
        return {NEGATIVE: replace(asked, question=self.params.negative_prompt, context="")}

    def streams(self, models: ModelPool, model: Model) -> tuple[Stream, ...]:
        """See `Contrast.streams`."""
        return (Stream(prompt=NEGATIVE),)

    def combine(self, logits: torch.Tensor, rows: StreamRows) -> torch.Tensor:
        """See `Contrast.combine`."""
        main, negative = logits.log_softmax(-1).unbind(1)
        return self.params.scale * (main - negative) + negative


PART = Cfg
