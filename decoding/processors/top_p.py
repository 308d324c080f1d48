"""Top-p: the most probable tokens that together have so much probability (nucleus; Holtzman et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, FiniteFloat

from decoding.processors.base import NEG_INF, Batch, LogitsProcessor, Stage, keep_from
from turnout.registry import MethodParams

SORTED = 64  # tokens of a row that are sorted at first, to find its nucleus


class TopPParams(MethodParams):
    """Parameters."""

    p: Annotated[FiniteFloat, Field(gt=0.0, le=1.0, description="nucleus mass; 1 is off")] = 0.9


class TopP(LogitsProcessor):
    """See the module. Of equally probable tokens at the edge, the first ones."""

    Params = TopPParams
    params: TopPParams
    stage = Stage.TRUNCATE
    reads_values = True
    keeps_best = True
    off: ClassVar = {"p": 1.0}

    @classmethod
    def apply(cls, logits: torch.Tensor, parts: Rows[Self], batch: Batch) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        limits = [part.params.p for part in parts]
        kept = nucleus(logits, batch.tensor(limits))
        if max(limits) < 1.0:
            return kept
        return torch.where(batch.tensor([limit < 1.0 for limit in limits], torch.bool), kept, logits)


def nucleus(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return rows, [rows, vocab], with tokens outside of their nuclei, top_p [rows, 1], excluded.

    Few are enough in most rows, so few are sorted at first. How many are depends on the batch, what is kept does not.
    """
    vocab = logits.shape[-1]
    # Not by `logsumexp`, whose last bits depend on the number of rows.
    whole = logits.amax(-1, keepdim=True) - logits.log_softmax(-1).amax(-1, keepdim=True)
    size = min(SORTED, vocab)
    while True:
        values = logits.topk(size, dim=-1).values
        mass = (values - whole).exp()
        inside = mass.cumsum(-1) - mass < top_p
        if size == vocab or not bool(inside[:, -1].any()):
            break
        size = min(4 * size, vocab)
    count = inside.sum(-1, keepdim=True).clamp(min=1)  # a top_p below what float32 holds is 0 here
    last = values.gather(-1, count - 1)
    kept = keep_from(logits, logits, last)
    if bool(((values.gather(-1, count.clamp(max=size - 1)) == last) & (count < size)).any()):
        equal = logits == last
        spare = (logits >= last).sum(-1, keepdim=True) - count  # of those equal to the last, too many
        kept = kept.masked_fill(equal & (equal.cumsum(-1) > equal.sum(-1, keepdim=True) - spare), NEG_INF)
    return kept


PART = TopP
