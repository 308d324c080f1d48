"""The last number of the answer is the row's."""

from __future__ import annotations

import math

from experiments.grid.scorers.text import last_number, number
from experiments.grid.scoring import Item, NumericChoice, Score
from pool.local_pool import LocalPool
from turnout.errors import invalid


class NumericScorer:
    """1 where it is, up to a relative error."""

    generates = True

    def __init__(self, choice: NumericChoice) -> None:
        self._choice = choice

    async def score(self, item: Item, answer: str, pool: LocalPool | None, model: str) -> Score:
        """See `Scorer.score`."""
        wanted = number(str(item.fields[self._choice.answer]))
        if wanted is None:
            raise invalid(self._choice.answer, f"must be a number (got {item.fields[self._choice.answer]!r})")
        got = last_number(answer)
        if got is None:
            return Score(0.0, "no number")
        return Score(float(math.isclose(got, wanted, rel_tol=self._choice.tolerance, abs_tol=0.0)))


SCORER = NumericScorer
