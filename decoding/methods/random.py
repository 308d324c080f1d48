"""One of the two models answers, drawn at random: the baseline for every rule that chooses between them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated

from pydantic import Field, FiniteFloat

from decoding.decode_loop import stream
from decoding.model import ModelPool, Request
from decoding.noise import Purpose, noise_key, uniform
from turnout.registry import MethodParams, method
from turnout.types import Segment

LANE = 2  # of the draw; others with its purpose are about runs within an answer


class RandomParams(MethodParams):
    """Parameters of `random`."""

    share: Annotated[FiniteFloat, Field(ge=0, le=1, description="share of answers that the large model writes")] = 0.5


def drawn_role(seed: int, share: float) -> str:
    """Role of the model that writes the answer with a seed."""
    return "large" if uniform(noise_key(seed, 0, Purpose.SWITCH, LANE)) < share else "small"


@method(params=RandomParams, lossless=False, needs=frozenset({"small", "large"}), resumable=True, over_text=True)
async def random(request: Request, models: ModelPool, params: RandomParams) -> AsyncIterator[Segment]:
    """One model answers alone, the large one with a chosen probability; the baseline of cascades and routers.

    Which one is keyed by the answer's seed.
    """
    seq = request.sequence
    writer = models.by_role(drawn_role(seq.seed, params.share))
    async with aclosing(stream(writer, seq, request.streams)) as segments:  # type: ignore[type-var]
        async for segment in segments:
            yield segment
