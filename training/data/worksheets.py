"""Worksheets: 8 to 12 arithmetic problems in one prompt, worked out one after the other in one answer.

An answer has at least 300 tokens of the demo's tokenizer, so that a rule with a window of five tokens and stays of ten
(Entropy Adaptive Decoding as published, paper #2) has something to decide; the demo's other answers have 40 to 70.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from training.data import arithmetic
from training.data.problem import ANSWER_MARK, Problem, is_heldout

DIFFICULTIES = (2, 3)  # sheets of higher grades are longer than a training row
TASK = "worksheet"
FEWEST, MOST = 8, 12
LEAST_CHARACTERS = 450  # of an answer; each has at least 0.7 tokens
_OPENINGS = ("Solve these problems.", "Work out each line.", "Worksheet:")
_RESULT = re.compile(rf"^(\d+)\).*?^{ANSWER_MARK} (-?\d+)$", re.MULTILINE | re.DOTALL)


def _sheet(rng: random.Random, difficulty: int, problem: Callable[[int], Problem]) -> Problem:
    """A sheet whose problems are of the grade, the one below and the one above."""
    if difficulty not in DIFFICULTIES:
        raise ValueError(f"difficulty must be one of {DIFFICULTIES}, got {difficulty}")
    problems: list[Problem] = []
    count = rng.randint(FEWEST, MOST)
    while len(problems) < count:
        problems.append(problem(rng.randint(difficulty - 1, difficulty + 1)))
        if len(problems) == count < MOST and len(_worked(problems)) < LEAST_CHARACTERS:
            count += 1
    lines = [f"{number}) {each.key}" for number, each in enumerate(problems, start=1)]
    prompt = "\n".join((rng.choice(_OPENINGS), *lines))
    results = " ".join(each.result for each in problems)
    return Problem(prompt, _worked(problems), results, difficulty, TASK, key="\n".join(each.key for each in problems))


def _worked(problems: list[Problem]) -> str:
    return "\n".join(f"{number}) {each.key}\n{each.answer}" for number, each in enumerate(problems, start=1))


def draw_training(rng: random.Random, difficulty: int) -> Problem:
    """Draw one sheet, none of whose problems is held out.

    Raises:
        ValueError: an unknown difficulty.
    """
    return _sheet(rng, difficulty, lambda grade: arithmetic.draw_training(rng, grade))


def heldout(difficulty: int, count: int, seed: int = 0) -> list[Problem]:
    """`count` distinct sheets of problems that training never sees; the same arguments give the same list.

    Raises:
        ValueError: an unknown difficulty.
    """
    rng = random.Random(f"worksheets-heldout-{seed}-{difficulty}")

    def drawn(grade: int) -> Problem:
        while not is_heldout((problem := arithmetic.draw(rng, grade)).key):
            pass
        return problem

    found: dict[str, Problem] = {}
    while len(found) < count:
        sheet = _sheet(rng, difficulty, drawn)
        found.setdefault(sheet.key, sheet)
    return list(found.values())


def share_right(problem: Problem, completion_text: str) -> float:
    """Part of a sheet's problems whose result stands behind their number, 0 to 1; the first one of a number counts."""
    found: dict[int, str] = {}
    for number, result in _RESULT.findall(completion_text):
        found.setdefault(int(number), result)
    wanted = problem.result.split()
    return sum(found.get(number) == result for number, result in enumerate(wanted, start=1)) / len(wanted)


def is_correct(problem: Problem, completion_text: str) -> bool:
    """Whether every result of a sheet is right."""
    return share_right(problem, completion_text) == 1.0
