"""Top-k: the k most probable tokens; ties with the last of them are kept, so that rows do not depend on a sort."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field

from decoding.processors.base import Batch, LogitsProcessor, Stage, keep_from
from turnout.registry import MethodParams


class TopKParams(MethodParams):
    """Parameters."""

    example: ClassVar = {"k": 5}

    k: Annotated[int, Field(ge=0, description="tokens kept; 0 is off")] = 50


class TopK(LogitsProcessor):
    """See the module."""

    Params = TopKParams
    params: TopKParams
    stage = Stage.TRUNCATE
    reads_values = True
    keeps_best = True
    off: ClassVar = {"k": 0}

    @classmethod
    def apply(cls, logits: torch.Tensor, parts: Rows[Self], batch: Batch) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        vocab = logits.shape[-1]
        sizes = [min(part.params.k or vocab, vocab) for part in parts]
        best = logits.topk(max(sizes), dim=-1).values
        last = best.gather(-1, batch.tensor([size - 1 for size in sizes], torch.int64))
        return keep_from(logits, logits, last)


PART = TopK
