"""One model decodes alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated

from pydantic import Field

from decoding.decode_loop import stream
from decoding.model import ModelPool, Request
from turnout.registry import MethodParams, ModelRole, method
from turnout.types import Segment


class PlainParams(MethodParams):
    """Parameters of `plain`."""

    model: Annotated[ModelRole, Field(description="role of the model that answers")] = "large"


@method(params=PlainParams, lossless=True, needs=frozenset(), resumable=True, over_text=True, contrasts=True)
async def plain(request: Request, models: ModelPool, params: PlainParams) -> AsyncIterator[Segment]:
    """One model answers alone."""
    writer = models.by_role(params.model)
    async with aclosing(stream(writer, request.sequence, request.streams)) as segments:  # type: ignore[type-var]
        async for segment in segments:
            yield segment
