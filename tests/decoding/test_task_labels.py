"""Decisions on a hierarchy of labels: the exact optimum of each measure, by brute force and by hand."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from decoding.tasks.label_hierarchy import Hierarchy, LabelHierarchyResult, Measure
from tests.decoding.task_runs import byte_model, result_of
from turnout.errors import Code, TurnoutError

# Seven labels: a root, two below it, and four leaves.
SEVEN = {"b": "a", "c": "a", "d": "b", "e": "b", "f": "c", "g": "c"}
# Leaves of several depths, and two roots.
UNEVEN = {"x1": "x", "x2": "x", "x21": "x2", "x22": "x2", "y1": "y"}


def path(tree: Hierarchy, parents: dict[str, str], label: str) -> set[str]:
    found = {label}
    while label in parents:
        found.add(label := parents[label])
    return found


def f_score(chosen: set[str], right: set[str], beta: float) -> float:
    precision, recall = len(chosen & right) / len(chosen), len(chosen & right) / len(right)
    if not chosen & right:
        return 0.0
    return (1 + beta**2) * precision * recall / (beta**2 * precision + recall)


@pytest.mark.parametrize("parents", [SEVEN, UNEVEN])
def test_the_best_set_is_the_best_of_all_subsets(parents: dict[str, str]) -> None:
    tree, draw = Hierarchy(parents), np.random.default_rng(0)
    subsets = [set(s) for k in range(1, len(tree.labels) + 1) for s in combinations(tree.labels, k)]
    for trial in range(100):
        probabilities = draw.dirichlet(np.full(len(tree.leaves), draw.choice([0.1, 1.0, 10.0])))
        beta = float(draw.choice([0.3, 1.0, 2.5]))
        worth = [
            sum(
                p * f_score(chosen, path(tree, parents, leaf), beta)
                for p, leaf in zip(probabilities, tree.leaves, strict=True)
            )
            for chosen in subsets
        ]
        places, value = tree.best_set(probabilities, beta)
        chosen = {tree.labels[place] for place in places}
        assert value == pytest.approx(max(worth)), trial
        assert worth[subsets.index(chosen)] == pytest.approx(value)
        assert all(path(tree, parents, label) <= chosen for label in chosen)


def test_a_certain_leaf_is_answered_with_what_is_above_it() -> None:
    tree = Hierarchy(SEVEN)
    certain = np.array([0.0, 0.0, 1.0, 0.0])
    places, value = tree.best_set(certain, 1.0)
    assert [tree.labels[each] for each in places] == ["a", "c", "f"]
    assert value == pytest.approx(1.0)
    measures: tuple[Measure, ...] = ("accuracy", "tree_distance", "wu_palmer")
    for measure in measures:
        assert tree.labels[tree.best_label(certain, measure)[0]] == "f"


def test_an_unsure_model_backs_off_to_a_label_above_the_leaves() -> None:
    wide = Hierarchy({f"leaf{n}": f"mid{n // 4}" for n in range(16)} | {f"mid{n}": "root" for n in range(4)})
    unsure = np.full(16, 1 / 16)
    assert [wide.labels[each] for each in wide.best_set(unsure, 1.0)[0]] == ["root"]
    assert wide.labels[wide.best_label(unsure, "tree_distance")[0]] == "root"
    # Sure of a middle label, not of its leaves.
    half = np.array([0.25] * 4 + [0.0] * 12)
    assert [wide.labels[each] for each in wide.best_set(half, 1.0)[0]] == ["root", "mid0"]


def test_measures_of_one_label_by_hand() -> None:
    tree = Hierarchy(SEVEN)
    order = [tree.labels.index(name) for name in "abdf"]
    leaf = tree.leaves.index("d")
    assert tree.utilities("tree_distance")[order, leaf].tolist() == [-2.0, -1.0, -0.0, -4.0]
    assert tree.utilities("wu_palmer")[order, leaf].tolist() == [0.5, 0.8, 1.0, 2 / 6]
    assert tree.utilities("accuracy")[order, leaf].tolist() == [0.0, 0.0, 1.0, 0.0]
    # 0.4, 0.2 and 0.4: the likeliest leaf is no better by edges than what two of three leaves have above them.
    probabilities = np.array([0.4, 0.3, 0.3, 0.0])
    best, value = tree.best_label(probabilities, "tree_distance")
    edges = {name: tree.utilities("tree_distance")[tree.labels.index(name)] @ probabilities for name in tree.labels}
    assert value == pytest.approx(max(edges.values()))
    assert tree.labels[best] == "b"


async def test_leaves_have_the_probability_of_their_texts_after_the_prompt() -> None:
    model = byte_model(5)
    found = await result_of("label_hierarchy", model, prompt="It is a", parents=SEVEN)
    scored = await result_of("score", model, prompt="It is a", completions=[f" {leaf}" for leaf in "defg"])
    weights = np.exp([each.logprob for each in scored.completions])  # type: ignore[attr-defined]
    assert isinstance(found, LabelHierarchyResult)
    assert found.leaves == pytest.approx(dict(zip("defg", weights / weights.sum(), strict=True)))
    tree = Hierarchy(SEVEN)
    places, value = tree.best_set(np.array(list(found.leaves.values())), 1.0)
    assert found.answer == [tree.labels[each] for each in places]
    assert found.value == pytest.approx(value)
    one = await result_of("label_hierarchy", model, prompt="It is a", parents=SEVEN, measure="accuracy")
    assert one.answer == [max(found.leaves, key=found.leaves.__getitem__)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"parents": {}}, "params.parents"),
        ({"parents": {"a": "b", "b": "a"}}, "params.parents"),
        ({"parents": {"a": "a"}}, "params.parents"),
        ({"parents": {f"l{n}": "r" for n in range(1024)}}, "params.parents"),
        ({"beta": 0.0}, "params.beta"),
        ({"beta": float("inf")}, "params.beta"),
        ({"measure": "best"}, "params.measure"),
        ({"prompt": ""}, "params.prompt"),
    ],
)
async def test_parameters_are_refused_by_name(params: dict[str, Any], field: str) -> None:
    with pytest.raises(TurnoutError) as refused:
        await result_of("label_hierarchy", byte_model(5), **{"prompt": "a", "parents": SEVEN, **params})
    assert (refused.value.code, refused.value.field) == (Code.INVALID_ARGUMENT, field)
