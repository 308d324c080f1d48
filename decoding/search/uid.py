"""Beam search with a regulariser that spreads information evenly over an answer (uniform information density)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, FiniteFloat

from decoding.model import ModelPool
from decoding.search._beams import Beam, BeamParams
from decoding.search._surprisals import MONOTONE, Regulariser, Surprisals, surprisals_after
from decoding.search.base import Hypothesis, Search, SearchTask, Selection, ordered

ROOM = 256


class UidParams(BeamParams):
    """Parameters."""

    regulariser: Annotated[
        Regulariser,
        Field(
            description="of the surprisals of an answer's tokens: their variance; local, the mean squared step; the"
            " greatest; the sum of their squares; greedy, of their squared distances from the least at each place"
        ),
    ] = "square"
    strength: Annotated[FiniteFloat, Field(ge=0.0, le=1e6, description="of the regulariser; 0 is beam search")] = 0.5


class UidSearch(Search):
    """Beams that spread information evenly, by paper #82 (If Beam Search is the Answer, What was the Question?).

    Beams are ordered by their log-probability minus `strength` times the regulariser of their tokens so far, inside the
    search and at its end; of answers the length penalty divides both together. The variance and the steps may prefer
    an improbable token: they choose among the `ROOM` likeliest, or twice the width. `exact` finds the best of all
    answers under the others.
    """

    Params = UidParams
    params: UidParams
    papers = (82,)
    score = "log-probability minus `strength` times the regulariser, divided as in `beam`, nats"

    def begin(self, task: SearchTask, models: ModelPool) -> Any:
        """See `Search.begin`."""
        self._beam = Beam(task, task.width, self.params)
        super().begin(task, models)
        return Surprisals()

    @property
    def fanout(self) -> int:
        """See `Search.fanout`."""
        if self.params.regulariser in MONOTONE:  # a likelier token is the better one
            return super().fanout
        return min(max(super().fanout, ROOM), self.task.vocab_size)

    def select(self, candidates: list[Hypothesis], open_: list[Hypothesis], done: list[Hypothesis]) -> Selection:
        """See `Search.select`."""
        for each in candidates:
            each.state = surprisals_after(each)
            each.score = each.logp - self.params.strength * each.state.value(self.params.regulariser)
        self._beam.advance(ordered(candidates))
        return Selection(self._beam.open, self._beam.done)

    def finished(self, open_: list[Hypothesis], done: list[Hypothesis]) -> bool:
        """See `Search.finished`."""
        return self._beam.finished


PART = UidSearch
