"""XTC, exclude top choices: with a chance, of several probable tokens only the least probable one is left."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, FiniteFloat

from decoding.best_tokens import best_tokens
from decoding.noise import Purpose, noise_key, uniform
from decoding.processors.base import LEAST, Batch, LogitsProcessor, Stage, exclude
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
    reads_values = True
    off: ClassVar = {"chance": 0.0}

    @classmethod
    def apply(cls, logits: torch.Tensor, parts: Rows[Self], batch: Batch) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        keys = [noise_key(each.seq.seed, each.position, Purpose.EXCLUDE) for each in batch.contexts]
        acts = [uniform(key) < part.params.chance for key, part in zip(keys, parts, strict=True)]
        never = 2.0
        floors = [part.params.threshold if act else never for act, part in zip(acts, parts, strict=True)]
        above = logits.softmax(-1) - batch.tensor(floors)
        # The first one of the least of those above stays; where there is none, that is any token.
        least = best_tokens(torch.threshold(above, -LEAST, never).neg_())[:, None]
        return exclude(logits, above.scatter(-1, least, -1.0).add_(LEAST))


PART = Xtc
