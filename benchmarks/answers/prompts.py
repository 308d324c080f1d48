"""Prompts of the page: held-out problems that nothing asked here was trained, tuned or calibrated on."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from training.calibration_data import DEMO, Question, is_right, read_questions
from training.data.problem import Problem
from training.router_runs import asked_for_shipped

# Grades that the large model does not answer nearly all of.
GRADES = {"arithmetic": (3, 4, 5), "lists": (1, 2, 3, 4, 5)}
TASKS = tuple(GRADES)
TEST_SEED, TRAINING_SEED = 45, 46
QUESTIONS = Path(__file__).with_name("questions.jsonl")
# Answers to arithmetic take some three times as long as those to lists.
SHARES = {"arithmetic": 0.4, "lists": 1.0}
MOST = 250  # that are scored
DRAWN = 2  # as many are drawn as are needed, because some were asked before


def asked(task: str, count: int) -> list[Problem]:
    """About `count` problems that are scored, all grades alike; of arithmetic fewer."""
    return _problems(task, round(SHARES[task] * count), TEST_SEED, asked_for_shipped(task))


def others(task: str, count: int) -> list[Problem]:
    """About `count` problems to train and tune on; none of them is among the first of `asked`."""
    scored = {problem.key for problem in asked(task, MOST)}
    return _problems(task, count, TRAINING_SEED, scored | asked_for_shipped(task))


def _problems(task: str, count: int, seed: int, without: set[str] | frozenset[str]) -> list[Problem]:
    grades = GRADES[task]
    each = -(-count // len(grades))
    found = []
    for grade in grades:
        drawn = DEMO[task].heldout(grade, DRAWN * each, seed=seed)
        found += [problem for problem in drawn if problem.key not in without][:each]
    return found


def question(task: str, problem: Problem) -> Question:
    """A problem with what judges its answers."""
    return Question(problem.prompt, partial(is_right, DEMO[task], problem))


def short_questions(count: int | None = None) -> list[Question]:
    """Questions to a model that people use, whose answers are a word or a number."""
    return list(read_questions(QUESTIONS, count).questions)
