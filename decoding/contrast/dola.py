"""DoLa: the last layer against the early one whose law differs most from it, at each token (Chuang et al. 2024)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, FiniteFloat

from decoding.contrast.base import Contrast, Stream, StreamRows, outside, plausible
from decoding.model import Model, ModelPool
from decoding.processors.base import row_sums
from turnout.errors import invalid
from turnout.registry import MethodParams

FIRST = 2  # early layer of the lower half: after the first one, little more than the token itself is known
DEEP = 40  # layers; of a deeper model, the first or last HALF are the candidates
HALF = 20


class DolaParams(MethodParams):
    """Parameters."""

    example: ClassVar = {"layers": [1, 2]}

    layers: Annotated[
        Literal["low", "high"] | tuple[Annotated[int, Field(ge=1)], ...],
        Field(
            description="candidates: every second layer of the lower or the upper half, or numbers of layers, 1 being"
            " the first; none is off"
        ),
    ] = "high"
    alpha: Annotated[
        FiniteFloat, Field(gt=0.0, le=1.0, description="share of the greatest probability that a token must have")
    ] = 0.1


class Dola(Contrast):
    """See the module: log p(last layer) - log p(early layer), where p(last) >= alpha * its greatest.

    Laws of early layers are their outputs through the head, without the last norm, and the early layer is that with the
    greatest mean of KL(mean || last) and KL(mean || early), both as in the authors' code.
    """

    Params = DolaParams
    params: DolaParams
    off: ClassVar = {"layers": ()}

    def streams(self, models: ModelPool, model: Model) -> tuple[Stream, ...]:
        """See `Contrast.streams`."""
        return tuple(Stream(layer=number) for number in self._numbers(model.num_layers))

    def _numbers(self, count: int) -> tuple[int, ...]:
        """Candidates among layers 1 to `count`, the last of which is none."""
        layers = self.params.layers
        if layers == "low":
            return tuple(range(FIRST, HALF if count > DEEP else count // 2, 2)) or (min(FIRST, max(count - 1, 1)),)
        if layers == "high":
            return tuple(range(max(count - HALF if count > DEEP else count // 2, 1), count, 2))
        for number in layers:
            if number >= count:
                raise invalid(f"{self.where}.layers", f"layer {number}; allowed: 1 to {count - 1}")
        return tuple(dict.fromkeys(layers))

    def combine(self, logits: torch.Tensor, rows: StreamRows) -> torch.Tensor:
        """See `Contrast.combine`."""
        laws = logits.log_softmax(-1)
        last, early = laws[:, :1], laws[:, 1:]
        if not early.shape[1]:
            return logits[:, 0]
        mean = 0.5 * (last.exp() + early.exp())
        apart = -2.0 * torch.special.entr(mean) - mean * (last + early)  # both divergences, token by token
        count, layers, vocab = apart.shape
        farthest = row_sums(apart.reshape(-1, vocab)).view(count, layers).argmax(-1)
        chosen = early.gather(1, farthest[:, None, None].expand(-1, 1, vocab))[:, 0]
        final = last[:, 0]
        return outside(final - chosen, plausible(final, self.params.alpha), final)


PART = Dola
