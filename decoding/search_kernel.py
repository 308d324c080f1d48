"""The kernel of searches: hypotheses of one request, read in one batch, whose sequences share their blocks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any

from decoding.decode_loop import reported
from decoding.model import Model, Readout, ReadSpec
from decoding.search.base import Hypothesis, Search
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

    Attributes:
        written: hypotheses that were read, and so written on forks.
    """

    def __init__(self, model: Model, search: Search, prompt: Sequence, state: Any, kept: int) -> None:
        self.written: set[Hypothesis] = set()
        self._model, self._search, self._prompt, self._kept = model, search, prompt, kept
        self._reported = reported(prompt)
        self._root = Hypothesis(None, state=state, seq=prompt)
        self._live: dict[Hypothesis, None] = {}  # with sequences of their own, the newest last

    async def run(self) -> list[Hypothesis]:
        """Search; return hypotheses to answer with, the best first. Close it afterwards."""
        search, open_, done = self._search, [self._root], list[Hypothesis]()
        while batch := search.pick(open_):
            self._write(batch, open_)
            candidates = search.expand(batch, await self._read(batch))
            for each in candidates:
                each.ended = self._ends(each)
            selection = search.select(candidates, open_, done)
            open_, done = selection.open, selection.done
            for each in (*open_, *done):
                self._settle(each)
            self._forget(open_)
            if not open_ or search.finished(open_, done):
                break
        return search.best(open_, done)

    def close(self) -> None:
        """Release all sequences."""
        for each in list(self._live):
            self._release(each)

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
        for node in each.path[len(seq.generated) - len(self._prompt.generated) :]:
            assert node.details is not None
            seq.append(node.details, self._model.num_parameters)
        self.written.add(each)

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
        if row is None or not self._reported.reads_logits:
            each.details = Token(each.token, name)
            return
        token = emitted(each.token, row, name, TokenKind.DECODED)
        each.details = token._replace(top=token.top[: self._reported.top])

    def _forget(self, open_: list[Hypothesis]) -> None:
        """Release sequences that no open hypothesis needs, and the oldest ones beyond those that are kept."""
        needed = {each if each.seq is not None else each.parent for each in open_}
        for each in [each for each in self._live if each not in needed]:
            self._release(each)
        for each in list(self._live)[: max(len(self._live) - self._kept, 0)]:
            self._release(each)

    def _release(self, each: Hypothesis) -> None:
        """Give a sequence back; its work is the request's, its tokens are counted when the search is over."""
        assert each.seq is not None
        seq, each.seq = each.seq, None
        del self._live[each]
        for meter in seq.meter.models.values():
            meter.generated_tokens = 0
        self._prompt.meter.merge(seq.meter)
        self._model.release(seq)


def count_discarded(prompt: Sequence, model: Model, written: set[Hypothesis], shown: Iterable[Hypothesis]) -> None:
    """Count as discarded what was written on forks and is in no answer."""
    lost = written.difference(*(each.path for each in shown))
    prompt.meter.of(model.name, model.num_parameters).discarded_tokens += len(lost)


def check_room(model: Model, prompt: Sequence, width: int, field: str) -> None:
    """Refuse more hypotheses than the model's memory holds at their greatest length; the prompt is held once.

    Raises:
        TurnoutError: OUT_OF_RANGE, naming the field and the greatest number that fits.
    """
    busy = model.busy()
    if not busy.capacity:
        return
    block = busy.block_size
    own = -(-prompt.num_remaining // block) + 1  # the block in which the prompt ends is copied
    room = busy.capacity // block - -(-len(prompt) // block)
    if width * own > room:
        fitting = f"at most {max(room // own, 0)} of up to {prompt.num_remaining} tokens fit the memory of {model.name}"
        raise out_of_range(field, f"{width} hypotheses; {fitting}; or lower max_tokens")
