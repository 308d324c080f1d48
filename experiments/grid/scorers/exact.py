"""The answer is the row's."""

from __future__ import annotations

from experiments.grid.scorers.text import final
from experiments.grid.scoring import ExactChoice, Item, Score
from pool.local_pool import LocalPool


class ExactScorer:
    """1 where the answer, or what follows its last `Answer:`, is the row's."""

    generates = True

    def __init__(self, choice: ExactChoice) -> None:
        self._choice = choice

    async def score(self, item: Item, answer: str, pool: LocalPool | None, model: str) -> Score:
        """See `Scorer.score`."""
        wanted, got = str(item.fields[self._choice.answer]).strip(), final(answer)
        if self._choice.ignore_case:
            wanted, got = wanted.casefold(), got.casefold()
        return Score(float(wanted == got))


SCORER = ExactScorer
