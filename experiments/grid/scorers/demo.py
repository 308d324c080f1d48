"""The check of a shipped task."""

from __future__ import annotations

from experiments.grid.scoring import DemoChoice, Item, Score
from pool.local_pool import LocalPool
from training.calibration_data import DEMO
from training.data.problem import Problem


class DemoScorer:
    """1 where the task says that the answer is right."""

    generates = True

    def __init__(self, choice: DemoChoice) -> None:
        self._task = DEMO[choice.task]

    async def score(self, item: Item, answer: str, pool: LocalPool | None, model: str) -> Score:
        """See `Scorer.score`."""
        fields = {name: item.fields[name] for name in ("answer", "result", "difficulty", "task")}
        return Score(float(self._task.is_correct(Problem(prompt=item.prompt, **fields), answer)))


SCORER = DemoScorer
