"""The kernel of searches: hypotheses of one request, read in one batch, whose sequences share their blocks."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

from decoding.decode_loop import reported
from decoding.logits import BITS_PER_NAT
from decoding.model import Model, Readout, ReadSpec
from decoding.search.base import MOST_OPEN, Hypothesis, Search
from decoding.sequence import Sequence
from decoding.verifiers.base import emitted
from turnout.errors import out_of_range
from turnout.types import Token, TokenKind


class SearchKernel:
    """Run of one search: gather what is read, expand, select, fork, release.

    A hypothesis has a sequence of its own only from when it is read until none of its continuations can need it. Of
    those that wait for that, the newest are kept; another one is made again of its tokens, whose full blocks the model
    finds in its prefix cache.

    Args:
        model: reads.
        search: decides.
        prompt: sequence of the request; nothing is appended to it, and the work is charged to it.
        state: of the search, of the empty answer.
        kept: most sequences that are kept between two batches.
        field: named where the search does not fit.

    Attributes:
        num_written: hypotheses that were read, and so written on forks.
    """

    def __init__(self, model: Model, search: Search, prompt: Sequence, state: Any, kept: int, field: str) -> None:
        self.num_written = 0
        self._field, self._batch = field, list[Hypothesis]()
        self._model, self._search, self._prompt, self._kept = model, search, prompt, kept
        self._reported = reported(prompt)
        self._root = Hypothesis(None, state=state, seq=prompt)
        self._live: dict[Hypothesis, None] = {}  # with sequences of their own, the newest last

    async def run(self) -> list[Hypothesis]:
        """Search; return hypotheses to answer with, the best first. Close it afterwards.

        Raises:
            TurnoutError: OUT_OF_RANGE, naming the field: hypotheses to be read do not fit the memory of the model, or
                too many wait.
        """
        search, open_, done = self._search, [self._root], list[Hypothesis]()
        while batch := self._fitting(search.pick(open_)):
            self._write(batch, open_)
            candidates = search.expand(batch, await self._read(batch))
            for each in candidates:
                each.ended = self._ends(each)
            await search.rescore(batch, candidates)
            selection = search.select(candidates, open_, done)
            open_, done = selection.open, selection.done
            if len(open_) > MOST_OPEN:
                raise out_of_range(self._field, f"more than {MOST_OPEN} hypotheses wait; lower it or max_tokens")
            for each in (*open_, *done):
                self._settle(each)
            self._forget(open_)
            if not open_ or search.finished(open_, done):
                break
        return await asyncio.to_thread(search.best, open_, done)  # of a large lattice it takes seconds

    def close(self) -> None:
        """Release all sequences."""
        self._search.close()
        for each in list(self._live):
            self._release(each)

    def _fitting(self, batch: list[Hypothesis]) -> list[Hypothesis]:
        """Return a batch whose caches fit the memory of the model together.

        Raises:
            TurnoutError: OUT_OF_RANGE: they do not.
        """
        most = self._num_blocks()
        if most and len(batch) > 1 and self._exceed(batch, most):
            longest = max(each.length for each in batch)
            fitting = bisect_left(range(1, len(batch)), True, key=lambda count: self._exceed(batch[:count], most))
            message = f"{len(batch)} hypotheses of {longest} tokens do not fit the memory of {self._model.name}"
            raise out_of_range(self._field, f"{message}, {max(fitting, 1)} do; lower it or max_tokens")
        self._batch = batch
        return batch

    def _num_blocks(self) -> int:
        """Blocks of the model's memory; 0: not known."""
        busy = self._model.busy()
        return busy.capacity // busy.block_size

    def _exceed(self, hypotheses: Collection[Hypothesis], most: int) -> bool:
        """Return whether the caches of hypotheses and of the prompt hold more blocks than `most`."""
        size, before = self._model.busy().block_size, len(self._prompt)
        if -(-before // size) + sum(each.length // size + 2 for each in hypotheses) <= most:
            return False  # also where they shared nothing
        return held_blocks(hypotheses, before, size) > most

    def _write(self, batch: list[Hypothesis], open_: list[Hypothesis]) -> None:
        """Give each of a batch its sequence: its parent's, or a fork of it where others need that."""
        waiting = Counter(each.parent for each in open_ if each.seq is None)
        needed = {each for each in open_ if each.seq is not None} | {self._root}
        taken: list[Hypothesis] = []
        forked: list[tuple[Hypothesis, Sequence]] = []
        for each in batch:
            if each.seq is not None or each.parent is None:
                continue
            parent = each.parent
            waiting[parent] -= 1
            if parent.seq is not None and not waiting[parent] and parent not in needed:
                taken.append(each)
            else:
                forked.append((each, parent.seq or self._prompt))
        twins = self._model.fork_many([seq for _, seq in forked]) if forked else []
        for (each, _), twin in zip(forked, twins, strict=True):
            self._place(each, twin)
        for each in taken:
            assert each.parent is not None
            assert each.parent.seq is not None
            seq, each.parent.seq = each.parent.seq, None
            del self._live[each.parent]
            self._place(each, seq)

    def _place(self, each: Hypothesis, seq: Sequence) -> None:
        """Let a sequence that holds the beginning of a hypothesis be its own."""
        self._live[each], each.seq = None, seq
        for node in each.last(each.length - (len(seq.generated) - len(self._prompt.generated))):
            assert node.details is not None
            seq.append(node.details, self._model.num_parameters)
        self.num_written += not each.was_read
        each.was_read = True

    async def _read(self, batch: list[Hypothesis]) -> list[Readout]:
        """Read all of a batch together; the others end with the first that fails."""
        more = self._reported
        if more.reads_logits:
            more = more | ReadSpec(draw=None, logits=True)
        wants = [self._search.reads(each) | more for each in batch]
        tasks = [
            asyncio.ensure_future(self._model.extend(self._sequence(each), want=want))
            for each, want in zip(batch, wants, strict=True)
        ]
        try:
            return [row for [row] in await asyncio.gather(*tasks)]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _sequence(self, each: Hypothesis) -> Sequence:
        assert each.seq is not None
        return each.seq

    def _ends(self, each: Hypothesis) -> bool:
        """Return whether nothing can follow: an end token, a stop string, or the greatest length."""
        assert each.parent is not None
        if each.token in self._prompt.end_ids or each.length >= self._prompt.num_remaining:
            return True
        stop = self._sequence(each.parent).stop
        return stop is not None and stop.watches and stop.clone().feed(each.token)

    def _settle(self, each: Hypothesis) -> None:
        """Keep of what a hypothesis was read from what the answer reports of its token."""
        if each.details is not None or each.parent is None:
            return
        name, row = self._model.name, each.row
        each.row = None
        token = Token(each.token, name)
        if row is not None and self._reported.reads_logits:
            token = emitted(each.token, row, name, TokenKind.DECODED)
            token = token._replace(top=token.top[: self._reported.top])
        if self._reported.surprise and not self._prompt.sampling.greedy:
            token = token._replace(surprise_bits=(each.parent.logp - each.logp) * BITS_PER_NAT)
        each.details = token

    def _forget(self, open_: list[Hypothesis]) -> None:
        """Release sequences that no open hypothesis needs, and the oldest ones beyond those that are kept."""
        needed = {each if each.seq is not None else each.parent for each in open_}
        for each in [each for each in self._live if each not in needed]:
            self._release(each)
        for each in list(self._live)[: max(len(self._live) - self._kept, 0)]:
            self._release(each)
        half = self._num_blocks() // 2  # what only waits leaves the rest to other requests
        just_read = set(self._batch)
        waiting = [each for each in self._live if each not in just_read] if half else []
        while waiting and self._exceed(self._live, half):
            for each in waiting[: -(-len(waiting) // 2)]:
                self._release(each)
            waiting = waiting[-(-len(waiting) // 2) :]

    def _release(self, each: Hypothesis) -> None:
        """Give a sequence back; its work is the request's, its tokens are counted when the search is over."""
        assert each.seq is not None
        seq, each.seq = each.seq, None
        del self._live[each]
        for meter in seq.meter.models.values():
            meter.generated_tokens = 0
        self._prompt.meter.merge(seq.meter)
        self._model.release(seq)


def count_discarded(prompt: Sequence, model: Model, num_written: int, shown: Iterable[Hypothesis]) -> None:
    """Count as discarded what was written on forks and is in no answer; what answers share was written once."""
    nodes = {node.merged or node for each in shown for node in each.path}
    kept = [node for node in nodes if node.was_read]
    prompt.meter.of(model.name, model.num_parameters).discarded_tokens += num_written - len(kept)


def held_blocks(hypotheses: Iterable[Hypothesis], num_before: int, size: int) -> int:
    """Return the blocks that caches of hypotheses hold, with that of the prompt.

    They share the full blocks of what they have in common; the block that is begun is a copy of each one's own.

    Args:
        hypotheses: each with all of its tokens in its cache.
        num_before: tokens of the prompt.
        size: tokens of a block.
    """
    seen: set[Hypothesis] = set()
    count = -(-num_before // size)
    for each in hypotheses:
        here: Hypothesis | None = each
        count += (num_before + each.length) % size != 0
        while here is not None and here.parent is not None and here not in seen:
            seen.add(here)
            count += (num_before + here.length) % size == 0
            here = here.parent
    return count
