"""Rollouts: several continuations of an answer, written at the same time, none of which may be kept."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from typing import Any, TypeVar

from decoding.candidates import charge
from decoding.model import Model, ModelPool, StopCondition
from decoding.sequence import Sequence
from turnout.types import Segment

R = TypeVar("R")


async def together(work: Items[Coroutine[Any, Any, R]]) -> list[R]:
    """Run all at once, so that they share forwards, and return their results in order; where one fails, all end."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Branches:
    """Branches of an answer: forks of its sequence, forks of forks, and rollouts of these by any model.

    Each is released and charged once, as work that is thrown away; what is shown of one in the end is not.

    Args:
        seq: the request's; nothing is appended to it before `show`.
        readers: models that may have read branches of others.
    """

    def __init__(self, seq: Sequence, readers: Items[Model] = ()) -> None:
        self._seq = seq
        self._readers = readers
        self._live: dict[Sequence, Model] = {}

    def fork(self, model: Model, parents: Items[Sequence], seeds: Items[int]) -> list[Sequence]:
        """Return one fork of each of `parents` that `model` reads and writes, with a seed of its own."""
        forks = model.fork_many(parents)
        for fork, seed in zip(forks, seeds, strict=True):
            self._live[fork] = model
            fork.seed = seed
        return forks

    async def write(
        self, model: Model, parents: Items[Sequence], seeds: Items[int], until: StopCondition, temperature: float = -1.0
    ) -> list[Sequence]:
        """Fork each of `parents` and write on all forks at once.

        Args:
            model: writes.
            parents: what they continue.
            seeds: one for each.
            until: where each ends at the latest; no rule of it is changed.
            temperature: of the tokens; negative: the request's.
        """
        forks = self.fork(model, parents, seeds)
        for fork in forks if temperature >= 0.0 else ():
            fork.sampling = fork.sampling.model_copy(update={"temperature": temperature})
        await together([model.decode(fork, until.twins()) for fork in forks])
        return forks

    def drop(self, forks: Items[Sequence]) -> None:
        """Release forks that are not read any more, and charge their work."""
        for fork in forks:
            model = self._live.pop(fork)
            charge(self._seq, fork)
            for each in (model, *(reader for reader in self._readers if reader is not model)):
                each.release(fork)

    def show(self, best: Sequence, models: ModelPool) -> Segment:
        """Drop all, append to the request's sequence what `best` has beyond it, and return that."""
        seq, sizes = self._seq, models.sizes
        tokens = best.generated[len(seq.generated) :]
        self.drop(list(self._live))
        shown = seq.extend(tokens, sizes)
        for token in shown:
            seq.meter.of(token.source, sizes[token.source]).discarded_tokens -= 1
        return Segment(shown, "finish" if seq.finished else "max_tokens")


@contextmanager
def branches_of(seq: Sequence, readers: Items[Model] = ()) -> Iterator[Branches]:
    """Lend branches of an answer; those that are left are dropped in the end, however that comes."""
    branches = Branches(seq, readers)
    try:
        yield branches
    finally:
        branches.drop(list(branches._live))
