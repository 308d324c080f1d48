"""Embeddings: pooled hidden states of one model, as unit vectors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import torch

from decoding.model import ReadSpec
from decoding.sequence import Sequence
from turnout.embed_calls import EmbedCall, Embeddings, Pooling
from turnout.errors import invalid, out_of_range
from turnout.types import SamplingParams

if TYPE_CHECKING:
    from engine.member import PoolMember
    from pool.pool import Pool

AT_ONCE = 32  # sequences of one call that wait for their model together
WANTED: dict[Pooling, ReadSpec] = {
    "mean": ReadSpec(draw=None, mean=True),
    "last": ReadSpec(draw=None, hidden=frozenset({-1})),
}
T = TypeVar("T")
R = TypeVar("R")


async def embed(
    pool: Pool, call: EmbedCall, model: PoolMember, pooling: Pooling, inputs: list[list[int]]
) -> Embeddings:
    """Embed each input.

    Args:
        pool: whose tokens they are.
        call: what is asked for.
        model: whose hidden states are pooled.
        pooling: used where the call names none.
        inputs: of `pool.prompt_ids.embedded_ids`.

    Raises:
        TurnoutError: INVALID_ARGUMENT: a state has fewer numbers than are asked for; OUT_OF_RANGE: all vectors do not
            fit one answer. Both are known with the first state, before the others are computed.
    """
    want = WANTED[call.pooling or pooling]

    async def one(ids: list[int]) -> torch.Tensor:
        sharing = pool.share(call.tenant, ids, call.sharing)
        one_token, low = SamplingParams(temperature=0.0, max_tokens=1), call.priority == "batch"
        seq = Sequence(ids, one_token, 0, sharing=sharing, tenant=call.tenant, low_priority=low)
        try:
            [row] = await model.extend(seq, want=want)
        finally:
            model.release(seq)
        return _unit(row.mean if row.mean is not None else row.hidden[-1], call)

    vectors = [await one(inputs[0]), *await in_turns(inputs[1:], one)]
    data = torch.stack(vectors).numpy().astype("<f4").tobytes()
    return Embeddings(data, len(vectors[0]), tuple(map(len, inputs)))


def _unit(state: torch.Tensor, call: EmbedCall) -> torch.Tensor:
    """The first numbers of a state, normalised: float32 on the CPU."""
    width = len(state)
    if call.dimensions is not None and call.dimensions > width:
        raise invalid("dimensions", f"must be at most {width}, the width of the model's states (got {call.dimensions})")
    kept = call.dimensions or width
    if len(call.input) * kept > call.most_numbers:
        most = max(call.most_numbers // kept, 1)
        raise out_of_range("input", f"{len(call.input)} embeddings of {kept} numbers; at most {most} fit one answer")
    return torch.nn.functional.normalize(state[:kept].float().cpu(), dim=0)


async def in_turns(items: Iterable[T], work: Callable[[T], Awaitable[R]]) -> list[R]:
    """Results of work on each item, at most AT_ONCE at the same time; the first failure ends all of it."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(item: T) -> R:
        async with room:
            return await work(item)

    tasks = [asyncio.create_task(one(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
