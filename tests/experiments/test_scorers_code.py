"""Scorers that run what they score in the sandbox: tests on code, and regular expressions."""

from __future__ import annotations

import pytest

from decoding.code_execution import code_of
from experiments.grid.scorers.regex import RegexScorer
from experiments.grid.scorers.unit_tests import UnitTestsScorer
from experiments.grid.scoring import Item, RegexChoice, UnitTestsChoice
from turnout.errors import TurnoutError


async def test_unit_tests_run_on_the_code_in_the_answer() -> None:
    scorer = UnitTestsScorer(UnitTestsChoice(kind="unit_tests", timeout_s=60.0))
    item = Item("1", "Write add.", {"tests": "assert add(2, 3) == 5"})
    good = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
    pool: object = None
    assert (await scorer.score(item, good, pool, "")).value == 1.0  # type: ignore[arg-type]
    bad = await scorer.score(item, good.replace("a + b", "a - b"), pool, "")  # type: ignore[arg-type]
    assert (bad.value, bad.note) == (0.0, "AssertionError:")
    assert code_of("x = 1") == "x = 1"
    assert code_of("```\na\n```\nand\n```py\nb\n```") == "a\n\nb\n"


async def test_an_expression_that_never_ends_costs_its_prompt() -> None:
    pool: object = None
    plain = RegexScorer(RegexChoice(kind="regex", pattern="Rome"))
    assert (await plain.score(Item("1", ""), "in Rome", pool, "")).value == 1.0  # type: ignore[arg-type]
    greedy = RegexScorer(RegexChoice(kind="regex", field="answer"))
    assert (await greedy.score(Item("1", "", {"answer": r"\b4+\b"}), "is 44.", pool, "")).value == 1.0  # type: ignore[arg-type]
    assert (await greedy.score(Item("1", "", {"answer": r"^4+$"}), "is 44.", pool, "")).value == 0.0  # type: ignore[arg-type]
    with pytest.raises(TurnoutError, match="was not decided"):
        await greedy.score(Item("1", "", {"answer": r"^(a+)+$"}), "a" * 60 + "b", pool, "")  # type: ignore[arg-type]
    with pytest.raises(TurnoutError, match="no regular expression"):
        await greedy.score(Item("1", "", {"answer": "("}), "", pool, "")  # type: ignore[arg-type]
