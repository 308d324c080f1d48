"""A model whose next token is known already: the router read it at the prompt's end."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar, cast

from decoding.decode_loop import DecodeLoop
from decoding.model import Model, ModelPool, Readout, ReadSpec, WrappedModel
from decoding.operations import Decode, Operation
from decoding.read_spec import Decoded
from decoding.sequence import Sequence
from router.base import Asked, Reading
from turnout.types import Segment

R = TypeVar("R")


class PrimedModel(WrappedModel):
    """A model that takes the first token of one sequence from what was read; everything else is the model's own.

    So a request that was routed by the small model's reading, and that the small model begins to answer, costs no
    forward more than one that was not routed (paper #52, DiffAdapt: the probe reads what prefill computed anyway).

    Args:
        model: the one that read the prompt.
        seq: the prompt's sequence.
        reading: at the prompt's end.
    """

    def __init__(self, model: Model, seq: Sequence, reading: Reading) -> None:
        super().__init__(model)
        self._seq = seq
        self._reading = reading

    async def do(self, seq: Sequence, op: Operation[R]) -> R:
        """See `decoding.model.Model.do`."""
        return cast(R, await self._decode(seq, op)) if isinstance(op, Decode) else await self.inner.do(seq, op)

    async def _decode(self, seq: Sequence, op: Decode) -> Decoded:
        model, until = self.inner, op.until.twins()
        stretch = DecodeLoop(seq, until, model.name, model.num_parameters)
        if stretch.stopped_by or not self._knows(seq, stretch.want):
            return await model.do(seq, op)
        if not stretch.take(await self._row(seq, stretch.want)):
            return Decoded(stretch.segment, until.rules)
        left = None if until.max_tokens is None else until.max_tokens - 1
        rest = await model.decode(seq, replace(until, max_tokens=left))
        return Decoded(Segment(stretch.segment.tokens + rest.tokens, rest.stopped_by), until.rules)

    def _knows(self, seq: Sequence, want: ReadSpec) -> bool:
        if seq is not self._seq or len(seq) != seq.num_prompt_tokens:
            return False
        if want.before or want.mean or not want.hidden <= {-1}:
            return False
        return not self.inner.by_length or self._reading.sampling.max_tokens == seq.sampling.max_tokens

    async def _row(self, seq: Sequence, want: ReadSpec) -> Readout:
        """As it was read, or read once more from the hidden state where more is wanted or sampling has changed."""
        reading = self._reading
        if reading.covers(want) and reading.sampling == seq.sampling:
            return reading.only(want)
        [row] = await self.inner.read(seq, reading.row.hidden[-1][None], [()], want, normed=True)
        return row


def primed(models: ModelPool, asked: Asked) -> ModelPool:
    """The pool for a routed request: its small model begins where the routing has left it."""
    if asked.reading is None:
        return models
    name = models.roles["small"]
    small = PrimedModel(models.models[name], asked.request.sequence, asked.reading)
    return replace(models, models={**models.models, name: small})
