"""Dynamic focus: a lower temperature where inner layers expect other tokens than the last layer does (paper #68)."""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, FiniteFloat

from decoding.processors.base import NEG_INF, NOTHING, Batch, LogitsProcessor, Stage, row_sums
from decoding.processors.temperature import LEAST_TEMPERATURE
from decoding.read_spec import ReadSpec
from turnout.registry import MethodParams

MOST_LAYERS = 256


class DynamicFocusParams(MethodParams):
    """Parameters."""

    example: ClassVar = {"sigma": 0.02, "mask": 0.01}

    temperature: Annotated[FiniteFloat, Field(gt=0.0, le=10.0, description="where all layers agree")] = 1.2
    sigma: Annotated[
        FiniteFloat,
        Field(ge=0.0, le=1e6, description="nats of disagreement that halve the temperature; 0: it stays as it is"),
    ] = 4.0
    mask: Annotated[
        FiniteFloat, Field(gt=0.0, le=1.0, description="share of the greatest probability above which tokens count")
    ] = 0.1
    layers: Annotated[
        tuple[Annotated[int, Field(ge=1, le=MOST_LAYERS)], ...],
        Field(max_length=MOST_LAYERS, description="layers that are compared with the last one; none named: all others"),
    ] = ()
    normed: Annotated[
        bool, Field(description="whether inner layers go through the last norm before the head; not so in the paper")
    ] = False


class DynamicFocus(LogitsProcessor):
    """Dynamic focus decoding (paper #68): temperature * 0.5 ** (w / sigma).

    w is the mean over the layers of KL(p || q), both over the tokens whose p is more than `mask` of the greatest, made
    to sum to 1; p is read from the last layer, q by the head from an inner one. Layers that the model does not have are
    left out, and rows without inner layers, which only draft, have w = 0.
    """

    Params = DynamicFocusParams
    params: DynamicFocusParams
    papers = (68,)
    stage = Stage.TEMPERATURE
    keeps_best = True
    off: ClassVar = {"temperature": 1.0, "sigma": 0.0}

    def layers_of(self, num_layers: int) -> frozenset[int]:
        """The layers that are compared with the last one of a model with `num_layers`."""
        inner = range(1, num_layers)
        return frozenset(inner) & frozenset(self.params.layers or inner) if self.params.sigma else frozenset()

    def reads(self, num_layers: int) -> ReadSpec:
        """See `LogitsProcessor.reads`."""
        layers = self.layers_of(num_layers)
        return ReadSpec(draw=None, hidden=layers) if layers else NOTHING

    @classmethod
    def apply(cls, logits: torch.Tensor, parts: Rows[Self], batch: Batch) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        base = batch.tensor([part.params.temperature for part in parts])
        if batch.states is None or not any(part.params.sigma for part in parts):
            return logits / base
        sigma = batch.tensor([part.params.sigma or math.inf for part in parts])
        return logits / (base * 0.5 ** (disagreement(parts, batch) / sigma)).clamp(min=LEAST_TEMPERATURE)


def disagreement(parts: Rows[DynamicFocus], batch: Batch) -> torch.Tensor:
    """Mean of KL(p || q) over each row's layers, nats: [rows, 1]."""
    assert batch.states is not None
    chosen = [part.layers_of(batch.states.num_layers) for part in parts]
    floor = batch.tensor([math.log(part.params.mask) for part in parts])
    raw = batch.raw
    counts = raw > raw.amax(-1, keepdim=True) + floor
    counts |= raw == raw.amax(-1, keepdim=True)
    own = raw.masked_fill(~counts, NEG_INF).log_softmax(-1)
    probs = own.exp()
    total, layers = torch.zeros_like(floor), torch.zeros_like(floor)
    pairs = list(zip(parts, chosen, strict=True))
    for layer, normed in sorted({(layer, part.params.normed) for part, them in pairs for layer in them}):
        inner = batch.head(layer, normed)
        if inner is None:
            continue
        theirs = inner.masked_fill(~counts, NEG_INF).log_softmax(-1)
        divergence = row_sums((probs * (own - theirs)).masked_fill(~counts, 0.0)).clamp(min=0.0)
        asked = [layer in them and part.params.normed is normed for part, them in pairs]
        wanted = batch.tensor(asked)
        total, layers = total + wanted * divergence, layers + wanted
    return total / layers.clamp(min=1.0)


PART = DynamicFocus
