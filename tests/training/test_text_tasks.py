"""Edits, passages and forms: every answer follows from its question, and no held-out problem is taught."""

import json
import random
import re
from types import ModuleType

import pytest

from training.data import edits, passages, templates
from training.data.problem import is_heldout
from training.data.python_sources import read_sources

TASKS = (edits, passages, templates)


def name_of(data: ModuleType) -> str:
    return data.__name__.rpartition(".")[2]


@pytest.mark.parametrize("data", TASKS, ids=name_of)
def test_answers_are_judged_right_and_changed_ones_wrong(data: ModuleType) -> None:
    rng = random.Random(1)
    for difficulty in data.DIFFICULTIES:
        for task in data.TASKS:
            problem = data.draw(rng, difficulty, task=task)
            assert (problem.task, problem.difficulty) == (task, difficulty)
            assert data.is_correct(problem, problem.answer)
            assert not data.is_correct(problem, problem.answer + "x")


@pytest.mark.parametrize("data", TASKS, ids=name_of)
def test_heldout_problems_are_distinct_and_repeat(data: ModuleType) -> None:
    problems = data.heldout(2, 50, seed=3)
    assert problems == data.heldout(2, 50, seed=3)
    assert problems != data.heldout(2, 50, seed=4)
    assert len({problem.prompt for problem in problems}) == 50


@pytest.mark.parametrize("data", TASKS, ids=name_of)
def test_unknown_arguments_are_refused(data: ModuleType) -> None:
    with pytest.raises(ValueError, match="task must be one of"):
        data.draw(random.Random(0), 1, task="poem")
    with pytest.raises(ValueError, match="difficulty must be one of"):
        data.draw(random.Random(0), 6)


@pytest.mark.parametrize("data", [passages, templates], ids=name_of)
def test_training_never_draws_a_heldout_problem(data: ModuleType) -> None:
    rng = random.Random(6)
    assert not any(is_heldout(data.draw_training(rng, rng.choice(data.DIFFICULTIES)).key) for _ in range(500))
    assert all(is_heldout(problem.key) for problem in data.heldout(3, 50))


def test_heldout_edits_come_from_heldout_modules() -> None:
    taught = "\n".join(text.expandtabs(4) for text in read_sources())
    problems = edits.heldout(4, 40, task="repeat")
    assert all(problem.key not in taught for problem in problems)
    drawn = [edits.draw_training(random.Random(seed), 1).key.split("\n")[0].strip() for seed in range(40)]
    assert all(line in taught for line in drawn)


def test_an_edit_changes_what_it_says_and_nothing_else() -> None:
    rng = random.Random(2)
    for _ in range(60):
        rename = edits.draw(rng, 3, task="rename")
        order = re.match(r"Rename (\w+) to (\w+)\.", rename.prompt)
        assert order is not None
        old, new = order.groups()
        assert not re.search(rf"\b{old}\b", rename.answer)
        assert re.sub(rf"\b{new}\b", old, rename.answer) == rename.key
        remove = edits.draw(rng, 3, task="remove")
        gone = remove.prompt.splitlines()[0].removeprefix("Remove the line ")
        assert [line for line in remove.key.split("\n") if line.strip() != gone] == remove.answer.split("\n")
        repeat = edits.draw(rng, 3, task="repeat")
        assert repeat.prompt.partition("\n")[2] == repeat.answer
        assert len(repeat.answer) <= edits.MAX_CHARS


def test_the_answer_stands_in_the_passage_once() -> None:
    rng = random.Random(3)
    for difficulty in passages.DIFFICULTIES:
        for _ in range(40):
            problem = passages.draw(rng, difficulty)
            told = problem.answer.splitlines()[0]
            assert problem.prompt.count(told) == 1
            assert problem.result in told


def test_forms_hold_every_field_of_their_request() -> None:
    rng = random.Random(4)
    for _ in range(30):
        record = templates.draw(rng, 3, task="record")
        filled = json.loads(re.sub(r",\n  \]", "\n  ]", record.answer))
        assert len(filled["animals"]) == 3
        for value in (filled["owner"], filled["city"], filled["date"], str(filled["id"])):
            assert value in record.prompt
        for animal in filled["animals"]:
            assert f"{animal['colour']} {animal['kind']} of {animal['age']}" in record.prompt
