"""Rollouts: several continuations of an answer, written at the same time, none of which may be kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Sequence as Items
from contextlib import asynccontextmanager

from decoding.model import Model, StopCondition
from decoding.sequence import Sequence


@asynccontextmanager
async def roll(model: Model, seq: Sequence, seeds: Items[int], until: StopCondition) -> AsyncIterator[list[Sequence]]:
    """Yield continuations of `seq`, each drawn with a seed of its own up to a stop condition; release them then.

    They share the cache of `seq`. The caller takes over what it keeps, and charges the work of all, with `show` and
    `charge` of `decoding.candidates`. Where one fails, the others end.

    Args:
        model: writes.
        seq: nothing is appended to it.
        seeds: one for each.
        until: where each ends at the latest.
    """
    forks = model.fork_many([seq] * len(seeds))
    for fork, seed in zip(forks, seeds, strict=True):
        fork.seed = seed
    tasks = [asyncio.ensure_future(model.decode(fork, until.twins())) for fork in forks]
    try:
        await asyncio.gather(*tasks)
        yield forks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for fork in forks:
            model.release(fork)
