"""What exact and numeric scorers take for an answer."""

from __future__ import annotations

import pytest

from experiments.grid.scorers.exact import ExactScorer
from experiments.grid.scorers.numeric import NumericScorer
from experiments.grid.scorers.text import last_number, number
from experiments.grid.scoring import ExactChoice, Item, NumericChoice
from turnout.errors import TurnoutError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10-15", 15.0),
        ("= -15", -15.0),
        ("(-3)", -3.0),
        ("x-5", 5.0),
        ("3,4", 4.0),
        ("1,234,567.5 in all", 1_234_567.5),
        ("12,3456", 3456.0),
        ("it is 7.", 7.0),
        (".5", 0.5),
        ("1.2e3", 1200.0),
        ("1e999", None),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text: str, value: float | None) -> None:
    assert last_number(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("1,234", 1234.0), ("3,4", None), (" -2. ", -2.0), ("2 apples", None), ("inf", None)]
)
def test_a_number_and_nothing_else(text: str, value: float | None) -> None:
    assert number(text) == value


@pytest.mark.parametrize(
    ("ignore_case", "answer", "score"),
    [
        (False, "Paris", 1.0),
        (False, "so.\nAnswer: Paris", 1.0),
        (False, "Answer: Rome\nAnswer: Paris", 1.0),
        (False, "Paris is it", 0.0),
        (False, "paris", 0.0),
        (True, "paris", 1.0),
    ],
)
async def test_exact(ignore_case: bool, answer: str, score: float) -> None:
    scorer = ExactScorer(ExactChoice(kind="exact", answer="city", ignore_case=ignore_case))
    assert (await scorer.score(Item("a", "?", {"city": " Paris "}), answer, None, "large")).value == score


@pytest.mark.parametrize(
    ("wanted", "tolerance", "answer", "score"),
    [
        (42, 0.0, "6*7 = 42.", 1.0),
        ("1,200", 0.0, "1200", 1.0),
        (42, 0.0, "42 of 50", 0.0),
        (100, 0.01, "100.9", 1.0),
        (100, 0.01, "102", 0.0),
        (0, 0.01, "0", 1.0),
        (0, 0.01, "0.001", 0.0),
        (-5, 0.0, "10 - 15 = -5", 1.0),
        (5, 0.0, "no idea", 0.0),
    ],
)
async def test_numeric(wanted: object, tolerance: float, answer: str, score: float) -> None:
    scorer = NumericScorer(NumericChoice(kind="numeric", answer="n", tolerance=tolerance))
    assert (await scorer.score(Item("a", "?", {"n": wanted}), answer, None, "large")).value == score


async def test_a_row_whose_answer_is_no_number_is_refused() -> None:
    scorer = NumericScorer(NumericChoice(kind="numeric", answer="n"))
    with pytest.raises(TurnoutError, match="must be a number"):
        await scorer.score(Item("a", "?", {"n": "many"}), "3", None, "large")
