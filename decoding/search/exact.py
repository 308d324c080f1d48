"""Exact search: branch and bound finds the best of all answers, with or without a regulariser of surprisals."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat

from decoding.model import ModelPool, ReadSpec
from decoding.search._surprisals import Surprisals, surprisals_after
from decoding.search.base import MOST_OPEN, Hypothesis, Search, SearchTask, Selection, ordered
from turnout.errors import invalid
from turnout.registry import MethodParams


class ExactParams(MethodParams):
    """Parameters."""

    regulariser: Annotated[
        Literal["max", "square", "greedy"],
        Field(description="of the surprisals, as in `uid`: those that no further token lowers"),
    ] = "square"
    strength: Annotated[
        FiniteFloat, Field(ge=0.0, le=1e6, description="of the regulariser; 0: the likeliest answers are found")
    ] = 0.0
    calls: Annotated[
        int,
        Field(ge=1, le=1_000_000, description="hypotheses read before it gives up and answers with the best so far"),
    ] = 10_000


class ExactSearch(Search):
    """The n best answers, exactly, by paper #82: depth first, the best continuation first.

    No token raises a score, so what scores less than the worst of n answers is left out with all that would follow.
    The last `width` waiting hypotheses are read in one batch, or fewer: what waits is bounded. Where `calls` run out,
    the report says so.
    """

    Params = ExactParams
    params: ExactParams
    papers = (82,)
    score = "log-probability minus `strength` times the regulariser, nats"

    def begin(self, task: SearchTask, models: ModelPool) -> Any:
        """See `Search.begin`."""
        if task.max_tokens * task.vocab_size > MOST_OPEN:
            most = MOST_OPEN // task.vocab_size
            raise invalid(
                "max_tokens", f"at most {most} for an exact search with {task.vocab_size} tokens to choose from"
            )
        # Each that is read leaves the whole vocabulary waiting, at every length.
        self._at_once = min(task.width, MOST_OPEN // (task.max_tokens * task.vocab_size))
        self._calls, self._left, self._bound = 0, 1, float("-inf")
        self._read: list[Hypothesis] = []
        super().begin(task, models)
        return Surprisals()

    def reads(self, hypothesis: Hypothesis) -> ReadSpec:
        """See `Search.reads`."""
        return ReadSpec(draw=None, top_processed=self.task.vocab_size)

    def pick(self, open_: list[Hypothesis]) -> list[Hypothesis]:
        """See `Search.pick`."""
        most = min(self._at_once, self.params.calls - self._calls)
        self._read = open_[-most:] if most > 0 else []
        self._calls += len(self._read)
        return self._read

    def select(self, candidates: list[Hypothesis], open_: list[Hypothesis], done: list[Hypothesis]) -> Selection:
        """See `Search.select`."""
        for each in candidates:
            each.state = surprisals_after(each)
            each.score = each.logp - self.params.strength * each.state.value(self.params.regulariser)
        answers = self.task.answers
        done = ordered([*done, *(each for each in candidates if each.ended)])[:answers]
        if len(done) == answers:
            self._bound = done[-1].score
        read = set(self._read)
        waiting = [each for each in open_ if each not in read and each.score > self._bound]
        new = [each for each in candidates if not each.ended and each.score > self._bound]
        # What continues the last ones goes last, so that memory is that of one path.
        new.sort(key=lambda each: each.score)
        self._left = len(waiting) + len(new)
        return Selection([*waiting, *new], done)

    def finished(self, open_: list[Hypothesis], done: list[Hypothesis]) -> bool:
        """See `Search.finished`."""
        return False

    def report(self) -> dict[str, Any] | None:
        """See `Search.report`."""
        return {"calls": self._calls, "complete": not self._left}


PART = ExactSearch
