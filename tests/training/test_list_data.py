"""The list tasks against Python's own answers."""

import random
import re
from itertools import accumulate

import pytest

from training.data import lists
from training.data.problem import Problem, is_heldout


def items_of(problem: Problem) -> list[str]:
    return [piece for piece in re.findall(r"\d+|\b[a-z]\b", problem.prompt) if piece]


def expected_result(problem: Problem) -> str:
    items = items_of(problem)
    if problem.task == "count":
        wanted, *word = items
        return str(word.count(wanted))
    if problem.task == "reverse":
        return ", ".join(reversed(items))
    numbers = [int(item) for item in items]
    results = {
        "sort": sorted(numbers),
        "largest": [max(numbers)],
        "smallest": [min(numbers)],
        "running_sum": list(accumulate(numbers)),
    }
    return ", ".join(map(str, results[problem.task]))


@pytest.mark.parametrize("task", lists.TASKS)
def test_results_agree_with_python(task: str) -> None:
    rng = random.Random(task)
    for difficulty in lists.DIFFICULTIES:
        for _ in range(60):
            problem = lists.draw(rng, difficulty, task)
            assert problem.result == expected_result(problem), problem.prompt
            assert problem.answer.endswith(f"Answer: {problem.result}")
            assert lists.is_correct(problem, problem.answer)


@pytest.mark.parametrize(("name", "pick"), [("largest", max), ("smallest", min)])
def test_extremes_show_the_best_so_far(name: str, pick: object) -> None:
    assert callable(pick)
    problem = lists.draw(random.Random(3), 4, name)
    numbers = [int(item) for item in items_of(problem)]
    trail = ", ".join(str(pick(numbers[: end + 1])) for end in range(len(numbers)))
    assert problem.answer.splitlines()[0] == f"So far: {trail}"


def test_running_sum_steps_add_up() -> None:
    problem = lists.draw(random.Random(4), 5, "running_sum")
    steps = problem.answer.splitlines()[:-1]
    assert len(steps) == lists.list_len(5) - 1
    for step in steps:
        left, right, total = map(int, re.split(r"[+=]", step))
        assert left + right == total


def test_longer_lists_at_higher_difficulty() -> None:
    lengths = [len(items_of(lists.heldout(d, 1, task="sort")[0])) for d in lists.DIFFICULTIES]
    assert lengths == sorted(set(lengths))


def test_wording_does_not_move_a_problem_across_the_split() -> None:
    rng = random.Random(5)
    for _ in range(200):
        problem = lists.draw(rng, 2, "sort")
        assert problem.key == "sort:" + " ".join(items_of(problem))


def test_training_never_draws_a_heldout_problem() -> None:
    kept_out = {problem.key for d in lists.DIFFICULTIES for problem in lists.heldout(d, 100)}
    rng = random.Random(6)
    drawn = {lists.draw_training(rng, rng.choice(lists.DIFFICULTIES)).key for _ in range(3000)}
    assert all(is_heldout(key) for key in kept_out)
    assert not kept_out & drawn


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="task must be one of"):
        lists.heldout(1, 1, task="shuffle")
    with pytest.raises(ValueError, match="difficulty must be one of"):
        lists.heldout(0, 1)
