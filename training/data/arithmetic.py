"""Graded arithmetic with worked steps: products first, then sums and differences from left to right."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from training.data.problem import ANSWER_MARK, Problem, final_answer, is_heldout

DIFFICULTIES = (1, 2, 3, 4, 5)
MIDDLE_DIFFICULTY = 3
TASK = "arithmetic"
_PHRASINGS = (
    "Compute {}.",
    "What is {}?",
    "Calculate {}.",
    "Evaluate {}.",
    "Work out {} step by step.",
    "{} = ?",
)
_SUBTRACT_SHARE = 0.45
_MAX_TRIES = 200_000


@dataclass(frozen=True)
class Grade:
    """What one difficulty draws: the operand count, the range of an operand, and how many products."""

    num_operands: int
    low: int
    high: int
    max_products: int
    three_digit_share: float = 0.0


GRADES: dict[int, Grade] = {
    1: Grade(num_operands=2, low=2, high=99, max_products=1),
    2: Grade(num_operands=3, low=2, high=99, max_products=1),
    3: Grade(num_operands=4, low=10, high=99, max_products=1),
    4: Grade(num_operands=5, low=10, high=99, max_products=2, three_digit_share=0.25),
    5: Grade(num_operands=6, low=10, high=99, max_products=2, three_digit_share=0.5),
}


@dataclass(frozen=True)
class Solution:
    """The steps of one expression in the order they are carried out, and its value."""

    steps: tuple[str, ...]
    value: int


def solve(expression: str) -> Solution | None:
    """Work out an expression of + - * over whole numbers; None when an intermediate result is negative.

    A product takes exactly one factor on its right (`a*b*c` is outside the language).
    """
    tokens = re.findall(r"\d+|[-+*]", expression)
    steps: list[str] = []
    terms: list[int] = []
    signs: list[str] = []
    position = 0
    while position < len(tokens):
        value = int(tokens[position])
        if position + 1 < len(tokens) and tokens[position + 1] == "*":
            factor = int(tokens[position + 2])
            steps.append(f"{value}*{factor}={value * factor}")
            value *= factor
            position += 2
        terms.append(value)
        if position + 1 < len(tokens):
            signs.append(tokens[position + 1])
        position += 2
    total = terms[0]
    for sign, term in zip(signs, terms[1:], strict=True):
        after = total + term if sign == "+" else total - term
        if after < 0:
            return None
        steps.append(f"{total}{sign}{term}={after}")
        total = after
    return Solution(tuple(steps), total)


def _draw_operand(rng: random.Random, grade: Grade) -> int:
    if rng.random() < grade.three_digit_share:
        return rng.randint(100, 999)
    return rng.randint(grade.low, grade.high)


def _draw_expression(rng: random.Random, grade: Grade) -> str:
    slots = list(range(grade.num_operands - 1))
    products: set[int] = set()
    for _ in range(rng.randint(0, grade.max_products)):
        free = [slot for slot in slots if not {slot - 1, slot, slot + 1} & products]
        if free:
            products.add(rng.choice(free))
    pieces: list[str] = []
    for slot in range(grade.num_operands):
        if slot - 1 in products:
            pieces.append(str(rng.randint(2, 9)))
        elif slot in products:
            pieces.append(str(rng.randint(grade.low, grade.high)))
        else:
            pieces.append(str(_draw_operand(rng, grade)))
        if slot in products:
            pieces.append("*")
        elif slot in slots:
            pieces.append("-" if rng.random() < _SUBTRACT_SHARE else "+")
    return "".join(pieces)


def draw(rng: random.Random, difficulty: int) -> Problem:
    """One problem of the grade, held out or not, in a randomly chosen phrasing."""
    if difficulty not in GRADES:
        raise ValueError(f"difficulty must be one of {DIFFICULTIES}, got {difficulty}")
    while True:
        expression = _draw_expression(rng, GRADES[difficulty])
        solution = solve(expression)
        if solution is not None:
            break
    work = "\n".join((*solution.steps, f"{ANSWER_MARK} {solution.value}"))
    prompt = rng.choice(_PHRASINGS).format(expression)
    return Problem(prompt, work, str(solution.value), difficulty, TASK, key=expression)


def draw_training(rng: random.Random, difficulty: int) -> Problem:
    """One problem that is not held out."""
    while is_heldout((problem := draw(rng, difficulty)).key):
        pass
    return problem


def _distinct_heldout(difficulty: int, seed: int) -> Iterator[Problem]:
    rng = random.Random(f"arithmetic-heldout-{seed}-{difficulty}")
    seen: set[str] = set()
    for _ in range(_MAX_TRIES):
        problem = draw(rng, difficulty)
        if is_heldout(problem.key) and problem.key not in seen:
            seen.add(problem.key)
            yield problem


def heldout(difficulty: int, count: int, seed: int = 0) -> list[Problem]:
    """`count` distinct problems that training never sees; the same arguments give the same list.

    Raises:
        ValueError: the difficulty is unknown, or the grade has fewer held-out problems than asked for.
    """
    problems = [problem for problem, _ in zip(_distinct_heldout(difficulty, seed), range(count), strict=False)]
    if len(problems) < count:
        raise ValueError(f"count must be at most {len(problems)} at difficulty {difficulty}, got {count}")
    return problems


def is_correct(problem: Problem, completion_text: str) -> bool:
    """Whether the number after the last answer mark of the completion is the problem's result."""
    found = re.match(r"-?\d+", final_answer(completion_text) or "")
    return found is not None and found.group() == problem.result
