"""One of the two models answers, drawn at random."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

from decoding.methods.random import RandomParams, drawn_role
from pool.endpoints.failover import TextModels, TextRequest
from pool.endpoints.streams import together
from pool.endpoints.text_model import one_of
from turnout.calls import Chunk


async def run(request: TextRequest, models: TextModels, params: RandomParams) -> AsyncIterator[Chunk]:
    """Answer each by the model that its seed draws."""
    calls = [one_of(request.call, index) for index in range(request.call.sampling.n)]
    drawn = [drawn_role(call.sampling.seed or 0, params.share) for call in calls]
    answers = [models.answer(request, *each) for each in zip(drawn, calls, strict=True)]
    async with aclosing(together(answers)) as chunks:  # type: ignore[type-var]
        async for index, chunk in chunks:
            yield replace(chunk, index=index)
