"""FoReaL-Decoding: the large model opens each sentence, the small one finishes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Annotated, Any, ClassVar

from pydantic import Field, FiniteFloat

from decoding.calibrated_params import CalibratedParams, calibrated
from decoding.calibration import TunableParam
from decoding.model import ModelPool, Request
from decoding.switching.base import SwitchParams, alternate
from decoding.switching.sentence import SentenceSwitch, sentence_marks
from turnout.registry import method
from turnout.types import Segment


class SentenceLeadParams(SwitchParams, CalibratedParams):
    """Parameters of `sentence_lead`."""

    example: ClassVar[Mapping[str, Any]] = {"lead_tokens": 2}
    knob: ClassVar[TunableParam] = TunableParam("lead_probability", fixed=("lead_tokens",))

    lead_tokens: Annotated[
        int, Field(ge=1, le=1_000_000, description="tokens the large model writes at the start of a sentence")
    ] = 15
    lead_probability: Annotated[
        FiniteFloat, Field(ge=0.0, le=1.0, description="chance that the large model opens a sentence")
    ] = 1.0


@method(params=SentenceLeadParams, papers=(202,), lossless=False, needs=frozenset({"small", "large"}))
async def sentence_lead(request: Request, models: ModelPool, params: SentenceLeadParams) -> AsyncIterator[Segment]:
    """The large model writes the first tokens of each sentence, the small one the rest.

    Paper #202 (FoReaL-Decoding). Each token follows the law of the model in its `source`.
    """
    params, _ = calibrated(request, models, params, "sentence_lead")
    seq = request.sequence
    # Reads the whole vocabulary the first time.
    marks = await asyncio.to_thread(sentence_marks, models.tokenizer, models.large.vocab_size)
    rule = SentenceSwitch(
        lead_tokens=params.lead_tokens,
        lead_probability=params.lead_probability,
        marks=marks,
        seed=seq.seed,
        position=len(seq),
        end_ids=seq.end_ids,
    )
    async with aclosing(alternate(request, models, rule, params.catch_up)) as segments:
        async for segment in segments:
            yield segment
