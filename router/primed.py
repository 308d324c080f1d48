"""A model whose next token's distribution is known already: the router read it at the prompt's end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from decoding.model import Model, ModelPool, Until, Want
from decoding.sequence import Sequence
from decoding.stretch import Stretch
from router.base import Asked
from turnout.types import Segment


class PrimedModel:
    """A model that takes the first token of one sequence from a hidden state; everything else is the model's own.

    So a request that was routed by the small model's reading, and that the small model begins to answer, costs no
    forward more than one that was not routed (seed 52, DiffAdapt: the probe reads what prefill computed anyway).

    Args:
        model: the one that read the prompt.
        seq: the prompt's sequence.
        hidden: its state at the prompt's end, after the last norm: [hidden].
    """

    def __init__(self, model: Model, seq: Sequence, hidden: torch.Tensor) -> None:
        self._model = model
        self._seq = seq
        self._hidden = hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    async def decode(self, seq: Sequence, until: Until = Until()) -> Segment:
        """See `decoding.model.Model.decode`."""
        model = self._model
        stretch = Stretch(seq, until, model.name, model.num_parameters)
        if stretch.stopped_by or not self._knows(seq, stretch.want):
            return await model.decode(seq, until)
        [row] = await model.read(seq, self._hidden[None], [()], stretch.want, normed=True)
        if not stretch.take(row):
            return stretch.segment
        left = None if until.max_tokens is None else until.max_tokens - 1
        rest = await model.decode(seq, replace(until, max_tokens=left))
        return Segment(stretch.segment.tokens + rest.tokens, rest.stopped_by)

    def _knows(self, seq: Sequence, want: Want) -> bool:
        return seq is self._seq and len(seq) == seq.num_prompt_tokens and not want.before and want.hidden <= {-1}


def primed(models: ModelPool, asked: Asked) -> ModelPool:
    """The pool for a routed request: its small model begins where the routing has left it."""
    if asked.row is None:
        return models
    name = models.roles["small"]
    small = PrimedModel(models.models[name], asked.request.sequence, asked.row.hidden[-1])
    return replace(models, models={**models.models, name: cast(Model, small)})
