"""Beam search, as transformers 5 defines it: length penalty, early stopping, the same answers."""

from __future__ import annotations

import heapq
from typing import Any

from decoding.model import ModelPool
from decoding.search._beams import Beam, BeamParams
from decoding.search.base import Hypothesis, Search, SearchTask, Selection, ordered


class BeamSearch(Search):
    """At each length the `width` likeliest beginnings go on. Answers are those that ended among the best."""

    Params = BeamParams
    params: BeamParams

    def begin(self, task: SearchTask, models: ModelPool) -> Any:
        """See `Search.begin`."""
        self._beam = Beam(task, task.width, self.params)
        return super().begin(task, models)

    def expand(self, read: list[Hypothesis], rows: Any) -> list[Hypothesis]:
        """See `Search.expand`: of all together only the likeliest can go on or end."""
        return heapq.nlargest(self.fanout, super().expand(read, rows), key=lambda each: each.logp)

    def select(self, candidates: list[Hypothesis], open_: list[Hypothesis], done: list[Hypothesis]) -> Selection:
        """See `Search.select`."""
        for each in candidates:
            each.score = each.logp
        self._beam.advance(ordered(candidates))
        return Selection(self._beam.open, self._beam.done)

    def finished(self, open_: list[Hypothesis], done: list[Hypothesis]) -> bool:
        """See `Search.finished`."""
        return self._beam.finished


PART = BeamSearch
