"""Demo prompts of experiments: none that the pair's routers learnt from, whatever the kind and the number."""

from __future__ import annotations

import pytest

from experiments.grid.datasets import DEMO_SEED, open_dataset
from experiments.grid.spec import DatasetChoice
from training.calibration_data import DEMO
from training.router_runs import KINDS, SHIPPED_COUNT, SHIPPED_SEED, asked_for_shipped, questions


@pytest.mark.parametrize("kind", KINDS)
def test_no_demo_prompt_is_one_that_a_router_learnt_from(kind: str) -> None:
    learnt = asked_for_shipped(kind)
    items = open_dataset(DatasetChoice(demo=kind, count=200)).items
    assert len(items) == len({item.prompt for item in items}) == 200
    assert not [item for item in items if item.fields["key"] in learnt]
    grades = [item.fields["difficulty"] for item in items]
    assert {grades.count(grade) for grade in DEMO[kind].DIFFICULTIES} == {200 // len(DEMO[kind].DIFFICULTIES)}


def test_some_would_have_been() -> None:
    plain = [problem for grade in (1, 2) for problem in DEMO["arithmetic"].heldout(grade, 80, seed=DEMO_SEED)]
    assert [problem for problem in plain if problem.key in asked_for_shipped("arithmetic")]


@pytest.mark.parametrize("count", [1, 3, 100, 1000])
def test_fewer_questions_are_the_first_of_more(count: int) -> None:
    """So what routers of samples learnt from, of which fewer are asked, is kept out, too."""
    all_of_them = {question.asked.prompt for question in questions(SHIPPED_COUNT, SHIPPED_SEED)}
    few = questions(count, SHIPPED_SEED)
    assert len(few) >= count
    assert {question.asked.prompt for question in few} <= all_of_them
