"""A regular expression is found in the answer."""

from __future__ import annotations

import re

from experiments.grid.scoring import Item, RegexChoice, Score
from pool.local_pool import LocalPool
from pool.sandbox import Limits, run_python
from turnout.errors import Code, TurnoutError, invalid

# An expression may take longer than anybody waits: it is looked for in a process that can be ended.
LIMITS = Limits(timeout_s=5.0, cpu_s=2)
# Without repetition inside a group there is nothing to try out again and again.
SAFE = re.compile(r"[^()*+?{}]*")
LOOK = "import re\nif re.search(*GIVEN) is None: raise LookupError"


class RegexScorer:
    """1 where it is; the expression comes from the file or from the row."""

    generates = True

    def __init__(self, choice: RegexChoice) -> None:
        self._choice = choice

    async def score(self, item: Item, answer: str, pool: LocalPool | None, model: str) -> Score:
        """See `Scorer.score`."""
        pattern = self._choice.pattern if self._choice.pattern is not None else str(item.fields[self._choice.field])
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise invalid(self._choice.field, f"is no regular expression: {error}") from None
        if SAFE.fullmatch(pattern):
            return Score(float(compiled.search(answer) is not None))
        ended = await run_python(LOOK, LIMITS, [pattern, answer])
        if ended.outcome == "passed" or ended.reason.startswith("LookupError"):
            return Score(float(ended.outcome == "passed"))
        raise TurnoutError(Code.OUT_OF_RANGE, f"{pattern!r} was not decided: {ended.reason}", "scorer.regex")


SCORER = RegexScorer
