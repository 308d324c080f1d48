"""The arithmetic generator: right steps, honest grades, a split that training cannot cross."""

import random
import re
from fractions import Fraction

import pytest

from training.data import arithmetic
from training.data.problem import Problem, is_heldout

STEP = re.compile(r"(\d+)([-+*])(\d+)=(\d+)")


def evaluate_independently(expression: str) -> Fraction:
    """Sum of signed products, without using the generator's own order of work."""
    total = Fraction(0)
    for sign, term in re.findall(r"([-+]?)([\d*]+)", expression):
        product = Fraction(1)
        for factor in term.split("*"):
            product *= int(factor)
        total += -product if sign == "-" else product
    return total


def sample(difficulty: int, count: int = 300) -> list[Problem]:
    rng = random.Random(f"test-{difficulty}")
    return [arithmetic.draw_training(rng, difficulty) for _ in range(count)]


@pytest.mark.parametrize("difficulty", arithmetic.DIFFICULTIES)
def test_every_worked_step_is_right(difficulty: int) -> None:
    for problem in sample(difficulty):
        *steps, last = problem.answer.split("\n")
        for step in steps:
            match = STEP.fullmatch(step)
            assert match is not None, step
            left, sign, right, result = int(match[1]), match[2], int(match[3]), int(match[4])
            assert {"+": left + right, "-": left - right, "*": left * right}[sign] == result >= 0
            assert sign != "*" or right < 10
        assert len(steps) == len(re.findall(r"[-+*]", problem.key))
        assert problem.key in problem.prompt
        assert last == f"Answer: {problem.result}"
        assert Fraction(problem.result) == evaluate_independently(problem.key)


def test_steps_follow_precedence_and_carry_their_results() -> None:
    solution = arithmetic.solve("37+48*3-12")
    assert solution == arithmetic.Solution(("48*3=144", "37+144=181", "181-12=169"), 169)


def test_negative_intermediate_results_are_refused() -> None:
    assert arithmetic.solve("10-20+50") is None
    assert arithmetic.solve("10-5*3+50") is None
    assert arithmetic.solve("50-20+10") == arithmetic.Solution(("50-20=30", "30+10=40"), 40)


def test_grades_are_monotone() -> None:
    steps = [sum(p.answer.count("=") for p in sample(d)) / 300 for d in arithmetic.DIFFICULTIES]
    digits = [sum(len(re.findall(r"\d", p.key)) for p in sample(d)) / 300 for d in arithmetic.DIFFICULTIES]
    assert steps == sorted(steps)
    assert len(set(steps)) == len(steps)
    assert digits == sorted(digits)
    assert len(set(digits)) == len(digits)
    assert steps[arithmetic.MIDDLE_DIFFICULTY - 1] >= 3


@pytest.mark.parametrize("difficulty", arithmetic.DIFFICULTIES)
def test_training_never_draws_a_heldout_problem(difficulty: int) -> None:
    kept_out = {problem.key for problem in arithmetic.heldout(difficulty, 200)}
    assert len(kept_out) == 200
    assert all(is_heldout(key) for key in kept_out)
    assert not kept_out & {problem.key for problem in sample(difficulty, 3000)}


def test_heldout_is_deterministic_and_depends_on_the_seed() -> None:
    assert arithmetic.heldout(3, 50) == arithmetic.heldout(3, 50)
    assert arithmetic.heldout(3, 50) == arithmetic.heldout(3, 80)[:50]
    assert arithmetic.heldout(3, 50) != arithmetic.heldout(3, 50, seed=1)


def test_heldout_refuses_what_it_cannot_give() -> None:
    with pytest.raises(ValueError, match="difficulty must be one of"):
        arithmetic.heldout(6, 1)
    with pytest.raises(ValueError, match="count must be at most"):
        arithmetic.heldout(1, 1_000_000)


def test_is_correct_reads_the_number_after_the_last_mark() -> None:
    problem = Problem("What is 1+2?", "1+2=3\nAnswer: 3", "3", 1, "arithmetic")
    assert arithmetic.is_correct(problem, problem.answer)
    assert arithmetic.is_correct(problem, "Answer: 4\nno: Answer: 3.")
    assert not arithmetic.is_correct(problem, "Answer: 3 or rather Answer: 4")
    assert not arithmetic.is_correct(problem, "Answer: 33")
    assert not arithmetic.is_correct(problem, "1+2=3")
    assert not arithmetic.is_correct(problem, "Answer:")
