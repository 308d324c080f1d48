"""Mirostat 2: tokens of more surprise than a bound are excluded; the bound keeps the mean surprise at a target."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field, FiniteFloat

from decoding.processors.base import NEG_INF, NOTHING, Batch, LogitsProcessor, Stage, keep_from
from decoding.read_spec import ReadSpec
from decoding.row_context import RowContext
from turnout.registry import MethodParams

BITS_PER_NAT = 1.4426950408889634


class MirostatParams(MethodParams):
    """Parameters."""

    example: ClassVar = {"tau": 1.0, "eta": 0.2}

    tau: Annotated[FiniteFloat, Field(ge=0.0, le=64.0, description="surprise that is aimed at, bits; 0 is off")] = 5.0
    eta: Annotated[FiniteFloat, Field(ge=0.0, le=1.0, description="how fast the bound follows")] = 0.1


class Mirostat(LogitsProcessor):
    """Mirostat 2 (Basu et al. 2021), as in llama.cpp.

    The bound mu begins at 2 tau; after each token it becomes mu - eta (s - tau), where s is the token's surprise in
    bits, -log2 of its probability in the distribution that it was drawn from. The most probable token always stays.
    Surprises are recorded with the tokens (`Token.surprise_bits`), so that mu is a function of these; a token without
    one, which something else chose, leaves it.
    """

    Params = MirostatParams
    params: MirostatParams
    stage = Stage.RESHAPE
    reads_values = True
    keeps_best = True
    prefix_pure = False
    off: ClassVar = {"tau": 0.0}

    def __init__(self, params: Any = None) -> None:
        super().__init__(params)
        self._bound, self._read = 2.0 * self.params.tau, 0

    def reads(self, num_layers: int) -> ReadSpec:
        """See `LogitsProcessor.reads`."""
        return ReadSpec(draw=None, surprise=True) if self.params.tau else NOTHING

    @classmethod
    def apply(cls, logits: torch.Tensor, parts: Rows[Self], batch: Batch) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        active = batch.tensor([part.params.tau > 0 for part in parts], torch.bool)
        bounds = batch.tensor([part.bound(context) for part, context in zip(parts, batch.contexts, strict=True)])
        bits = logits.log_softmax(-1) * BITS_PER_NAT
        return keep_from(logits, bits, (-bounds).masked_fill(~active, NEG_INF))

    def bound(self, context: RowContext) -> float:
        """Most bits of surprise that a token may have after those that are written."""
        written = context.seq.generated
        for place in range(self._read, len(written)):
            surprise = written[place].surprise_bits
            if surprise is not None:
                self._bound -= self.params.eta * (surprise - self.params.tau)
        self._read = len(written)
        return self._bound


PART = Mirostat
