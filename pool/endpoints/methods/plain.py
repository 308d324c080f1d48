"""One model answers alone."""

from __future__ import annotations

from collections.abc import AsyncIterator

from decoding.methods.plain import PlainParams
from pool.endpoints.failover import TextModels, TextRequest
from turnout.calls import Chunk


def run(request: TextRequest, models: TextModels, params: PlainParams) -> AsyncIterator[Chunk]:
    """Answer by the model of a role; its stream is passed on as it comes."""
    return models.answer(request, params.model, request.call)
