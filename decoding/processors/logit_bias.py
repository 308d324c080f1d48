"""Logit bias: a number added to the logits of given tokens (`logit_bias` of the API)."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field, FiniteFloat

from decoding.processors._cells import Cells
from decoding.processors.base import Batch, LogitsProcessor, Stage
from turnout.registry import MethodParams


class LogitBiasParams(MethodParams):
    """Parameters."""

    example: ClassVar = {"bias": {3: 5.0}}

    bias: Annotated[
        dict[int, Annotated[FiniteFloat, Field(ge=-100.0, le=100.0)]],
        Field(max_length=1024, description="added to the logit of a token id"),
    ] = Field(default_factory=dict)


class LogitBias(LogitsProcessor):
    """See the module."""

    Params = LogitBiasParams
    params: LogitBiasParams
    stage = Stage.BIAS
    off: ClassVar = {"bias": {}}

    @classmethod
    def token_ids(cls, params: Any) -> Iterable[int]:
        """See `LogitsProcessor.token_ids`."""
        ids: Iterable[int] = params.bias
        return ids

    @classmethod
    def apply(cls, logits: torch.Tensor, parts: Rows[Self], batch: Batch) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        cells = Cells.of([part.params.bias for part in parts], logits)
        return logits.index_put(cells.places, cells.values, accumulate=True)


PART = LogitBias
