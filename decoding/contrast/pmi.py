"""Pointwise mutual information: where the model is unsure, what the source made likelier (van der Poel et al. 2022)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field, FiniteFloat

from decoding.contrast.base import Asked, Contrast, Stream, StreamRows
from decoding.model import Model, ModelPool
from decoding.processors.base import row_entropy
from turnout.registry import MethodParams

SOURCELESS = "sourceless"


class PmiParams(MethodParams):
    """Parameters."""

    example: ClassVar = {"weight": 0.5, "threshold": 0.5}

    weight: Annotated[FiniteFloat, Field(ge=0.0, le=10.0, description="of the law without the source; 0 is off")] = 0.25
    threshold: Annotated[
        FiniteFloat, Field(ge=0.0, description="nats of entropy from which on the model is unsure; 0: always")
    ] = 2.0


class Pmi(Contrast):
    """See the module: log p - weight * log p(sourceless) where the entropy of p is at least the threshold, else log p.

    The source is the request's `context`; without one, the prompt or the last user message. Weight and threshold must
    be fitted to the model: the defaults are not the paper's.
    """

    Params = PmiParams
    params: PmiParams
    off: ClassVar = {"weight": 0.0}

    def prompts(self, asked: Asked) -> dict[str, Asked]:
        """See `Contrast.prompts`."""
        return {SOURCELESS: replace(asked, context="") if asked.context else replace(asked, question="")}

    def streams(self, models: ModelPool, model: Model) -> tuple[Stream, ...]:
        """See `Contrast.streams`."""
        return (Stream(prompt=SOURCELESS),)

    def combine(self, logits: torch.Tensor, rows: StreamRows) -> torch.Tensor:
        """See `Contrast.combine`."""
        main, sourceless = logits.log_softmax(-1).unbind(1)
        entropy = row_entropy(main.exp())
        return torch.where(entropy >= self.params.threshold, main - self.params.weight * sourceless, main)


PART = Pmi
