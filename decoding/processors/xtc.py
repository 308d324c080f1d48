"""XTC, exclude top choices: with a chance, of several probable tokens only the least probable one is left."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, FiniteFloat

from decoding.noise import Purpose, noise_key, uniform
from decoding.processors.base import NEG_INF, Batch, LogitsProcessor, Stage
from turnout.registry import MethodParams


class XtcParams(MethodParams):
    """Parameters."""

    threshold: Annotated[
        FiniteFloat, Field(gt=0.0, le=1.0, description="probability from which a token is a top choice; above 0.5: off")
    ] = 0.1
    chance: Annotated[FiniteFloat, Field(ge=0.0, le=1.0, description="of acting at a position; 0 is off")] = 0.5


class Xtc(LogitsProcessor):
    """See the module. Whether it acts is drawn by seed and position, so drafts and replays agree."""

    Params = XtcParams
    params: XtcParams
    stage = Stage.RESHAPE
    off: ClassVar = {"chance": 0.0}

    @classmethod
    def apply(cls, logits: torch.Tensor, parts: Rows[Self], batch: Batch) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        keys = [noise_key(each.seq.seed, each.position, Purpose.EXCLUDE) for each in batch.contexts]
        acts = [uniform(key) < part.params.chance for key, part in zip(keys, parts, strict=True)]
        probs = logits.softmax(-1)
        top = probs >= batch.tensor([part.params.threshold for part in parts])
        least = probs.where(top, 2.0).argmin(-1, keepdim=True)
        excluded = top.scatter(-1, least, False) & (top.sum(-1, keepdim=True) > 1)
        return logits.masked_fill(excluded & batch.tensor(acts, torch.bool), NEG_INF)


PART = Xtc
