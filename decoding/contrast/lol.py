"""LOL: the last layer and a lower one against an amateur taught to hallucinate, refocused on truth (paper #147)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field, FiniteFloat

from decoding.contrast.base import Asked, Contrast, Stream, StreamRows, outside, plausible
from decoding.model import Model, ModelPool
from turnout.errors import invalid
from turnout.registry import MethodParams, ModelRole

GUIDED = "guided"
TRUTHFUL = "Answer truthfully. Say only what you know to be a fact; where you do not know, say so."


class LolParams(MethodParams):
    """Parameters."""

    example: ClassVar = {"amateur": "small", "lower_weight": 0.4, "layer": 1}

    amateur: Annotated[ModelRole, Field(description="role of the model taught to hallucinate")] = "amateur"
    weight: Annotated[
        FiniteFloat, Field(ge=0.0, le=10.0, description="of the contrast with the amateur; all weights 0 are off")
    ] = 1.0
    lower_weight: Annotated[FiniteFloat, Field(ge=0.0, le=10.0, description="of the same contrast at `layer`")] = 0.1
    layer: Annotated[
        int | None, Field(ge=1, description="the lower layer, 1 being the first; absent: a third of the model's")
    ] = None
    refocus: Annotated[FiniteFloat, Field(ge=0.0, le=10.0, description="weight of what the guide makes likelier")] = 0.3
    guide: Annotated[
        str, Field(min_length=1, max_length=10_000, description="instruction of the guided stream, before the system's")
    ] = TRUTHFUL
    alpha: Annotated[
        FiniteFloat, Field(ge=0.0, le=1.0, description="share of the greatest probability that a token must have")
    ] = 0.1


class Lol(Contrast):
    """Paper #147: F + lower_weight * F(lower) + refocus * (log p(guided) - log p), where p >= alpha * its greatest.

    F is (1 + weight) * log p - weight * log p(amateur), of the last layer's output; F(lower) the same of a lower
    layer's output through the head, without the last norm. The amateur is the answering model after it was tuned on
    false answers (`turnout train amateur`): one that is only smaller makes it plain contrastive decoding. Coefficients
    are ours.
    """

    papers = (147,)
    Params = LolParams
    params: LolParams
    off: ClassVar = {"weight": 0.0, "lower_weight": 0.0, "refocus": 0.0, "alpha": 0.0}

    def prompts(self, asked: Asked) -> dict[str, Asked]:
        """See `Contrast.prompts`."""
        if not self.params.refocus:
            return {}
        system = "\n".join(each for each in (self.params.guide, asked.system) if each)
        return {GUIDED: replace(asked, system=system)}

    def streams(self, models: ModelPool, model: Model) -> tuple[Stream, ...]:
        """See `Contrast.streams`."""
        params, made = self.params, list[Stream]()
        if params.weight:
            made.append(Stream(role=params.amateur))
        if params.refocus:
            made.append(Stream(prompt=GUIDED))
        if params.lower_weight:
            contrasted = [models.by_role(params.amateur)] if params.weight else []
            layer = params.layer or max(1, model.num_layers // 3)
            most = min(each.num_layers for each in (model, *contrasted)) - 1
            if layer > most:
                raise invalid(f"{self.where}.layer", f"layer {layer}; allowed: 1 to {most}")
            made.append(Stream(layer=layer))
            made += [Stream(role=params.amateur, layer=layer) for _ in contrasted]
        return tuple(made)

    def combine(self, logits: torch.Tensor, rows: StreamRows) -> torch.Tensor:
        """See `Contrast.combine`."""
        params, laws = self.params, iter(logits.log_softmax(-1).unbind(1))
        main = next(laws)
        fused = self._against(main, laws)
        if params.refocus:
            fused = fused + params.refocus * (next(laws) - main)
        if params.lower_weight:
            fused = fused + params.lower_weight * self._against(next(laws), laws)
        return outside(fused, plausible(main, params.alpha), main)

    def _against(self, law: torch.Tensor, laws: Iterator[torch.Tensor]) -> torch.Tensor:
        """Contrast a law with the amateur's, the next of `laws`; without a weight there is none."""
        weight = self.params.weight
        return (1.0 + weight) * law - weight * next(laws) if weight else law


PART = Lol
