"""Python tests pass on the code in the answer."""

from __future__ import annotations

from decoding.code_execution import code_of
from experiments.grid.scoring import Item, Score, UnitTestsChoice
from pool.local_pool import LocalPool
from pool.sandbox import Limits, run_python


class UnitTestsScorer:
    """1 where the tests end without an exception; see `pool.sandbox` for what they may do."""

    generates = True

    def __init__(self, choice: UnitTestsChoice) -> None:
        self._choice = choice
        self._limits = Limits(
            timeout_s=choice.timeout_s,
            cpu_s=choice.cpu_s,
            memory_bytes=choice.memory_bytes,
            file_bytes=choice.file_bytes,
            folder_bytes=choice.folder_bytes,
            processes=choice.processes,
        )

    async def score(self, item: Item, answer: str, pool: LocalPool | None, model: str) -> Score:
        """See `Scorer.score`."""
        prefix = str(item.fields[self._choice.prefix]) if self._choice.prefix else ""
        program = "\n\n".join((prefix, code_of(answer), str(item.fields[self._choice.tests])))
        ended = await run_python(program, self._limits)
        return Score(float(ended.outcome == "passed"), ended.reason)


SCORER = UnitTestsScorer
