"""Prompts of the page: held-out problems that nothing asked here was trained, tuned or calibrated on."""

from __future__ import annotations

from dataclasses import dataclass
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
# Of the prompts, for the large model, which takes long for answers to arithmetic, and knows nearly all of them.
SHARES = {"arithmetic": 0.4, "lists": 1.0}
MOST = 250  # that are scored
DRAWN = 2  # as many are drawn as are needed, because some were asked before


@dataclass(frozen=True, slots=True)
class Case:
    """What a piece is about: a task, and the role of the model that answers."""

    task: str
    role: str

    @classmethod
    def of(cls, piece: str) -> Case:
        """The case of a piece, whose name ends in task and role."""
        _, task, role = piece.rsplit("-", 2)
        return cls(task, role)

    @property
    def title(self) -> str:
        """For the page."""
        return f"{self.task.capitalize()}, {self.role} model"

    def questions(self, count: int) -> list[Question]:
        """About `count` questions that are scored; fewer to the large model where they take it long."""
        share = SHARES[self.task] if self.role == "large" else 1.0
        return [question(self.task, problem) for problem in asked(self.task, round(share * count))]


def asked(task: str, count: int) -> list[Problem]:
    """About `count` problems that are scored, all grades alike."""
    return _problems(task, count, TEST_SEED, asked_for_shipped(task))


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
