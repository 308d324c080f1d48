"""CAD, context-aware decoding: away from what the question makes likely without its context (paper #169)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field, FiniteFloat

from decoding.contrast.base import Asked, Contrast, Stream, StreamRows
from decoding.model import Model, ModelPool
from turnout.errors import invalid
from turnout.registry import MethodParams

WITHOUT = "without_context"


class CadParams(MethodParams):
    """Parameters."""

    alpha: Annotated[FiniteFloat, Field(ge=0.0, le=100.0, description="0 is off; 0.3 to 1 are usual")] = 0.5


class Cad(Contrast):
    """Paper #169: (1 + alpha) * logits - alpha * logits without the request's `context`."""

    papers = (169,)
    Params = CadParams
    params: CadParams
    off: ClassVar = {"alpha": 0.0}

    def prompts(self, asked: Asked) -> dict[str, Asked]:
        """See `Contrast.prompts`."""
        if not asked.context:
            raise invalid("context", f"contrast {self.name!r} needs it: the text that the question is about")
        return {WITHOUT: replace(asked, context="")}

    def streams(self, models: ModelPool, model: Model) -> tuple[Stream, ...]:
        """See `Contrast.streams`."""
        return (Stream(prompt=WITHOUT),)

    def combine(self, logits: torch.Tensor, rows: StreamRows) -> torch.Tensor:
        """See `Contrast.combine`."""
        alpha = self.params.alpha
        return (1.0 + alpha) * logits[:, 0] - alpha * logits[:, 1]


PART = Cad
