"""The step of a beam, as transformers 5 defines it: which hypotheses go on, which have ended, when it is enough."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from typing import Annotated

from pydantic import Field, FiniteFloat

from decoding.search.base import Hypothesis, SearchTask, ordered
from turnout.registry import MethodParams
from turnout.types import EarlyStopping


class BeamParams(MethodParams):
    """Parameters of searches that follow beams."""

    length_penalty: Annotated[
        FiniteFloat,
        Field(ge=-16.0, le=16.0, description="an answer's log-probability is divided by its length to this power"),
    ] = 1.0
    early_stopping: Annotated[
        EarlyStopping,
        Field(
            description="true: stop with as many answers as beams; false: also when the best beam, at its length, does"
            ' not beat them; "never": when it cannot, at any length'
        ),
    ] = False


class Beam:
    """Beam of one group of hypotheses.

    Args:
        task: bounds of the search.
        width: hypotheses that are followed.
        params: when to stop, and the length penalty.

    Attributes:
        open: hypotheses that go on, the best first.
        done: the best that have ended, at most `width`, the best first.
    """

    def __init__(self, task: SearchTask, width: int, params: BeamParams) -> None:
        self.open: list[Hypothesis] = []
        self.done: list[Hypothesis] = []
        self._task, self._width, self._params = task, width, params
        self._ranked = max(2, 1 + len(task.end_ids)) * width  # enough, also where the best ones all end

    def advance(self, ranked: Items[Hypothesis]) -> list[Hypothesis]:
        """Take the continuations of the open hypotheses, ordered, `score` being what they are ordered by.

        Of those that end only the best `width` of all count. Their scores become final ones.

        Returns:
            The continuations that were chosen: those that go on, and those that end.
        """
        ranked = ranked[: self._ranked]
        ended = [each for each in ranked[: self._width] if each.ended]
        self.take([each for each in ranked if not each.ended][: self._width], ended)
        return [*self.open, *ended]

    def take(self, following: list[Hypothesis], ended: list[Hypothesis]) -> tuple[list[Hypothesis], list[Hypothesis]]:
        """Take chosen continuations, those that go on ordered; return the open ones and the best that have ended."""
        for each in ended:
            each.score = self.normalised(each.score, each.length)
        self.open, self.done = following, ordered([*self.done, *ended])[: self._width]
        return self.open, self.done

    def normalised(self, value: float, length: int) -> float:
        """Return a sum of log-probabilities under the length penalty."""
        return value / math.pow(length, self._params.length_penalty)

    @property
    def finished(self) -> bool:
        """True if none is open, or it cannot improve the answers, as `early_stopping` understands that."""
        if not self.open:
            return True
        if len(self.done) < self._width:
            return False
        if self._params.early_stopping is True:
            return True
        longest = self._params.early_stopping == "never" and self._params.length_penalty > 0.0
        length = self._task.max_tokens if longest else self.open[0].length
        return self.normalised(self.open[0].score, length) <= self.done[-1].score
