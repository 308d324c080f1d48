"""Bundles on nodes: what is found to fit does, and what is refused fits in no way."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments import placement_check as fitting
from deployments.placement_check import HEAD_MARK, Growth, NodeType, Replica, Resources, Unplaced, fit, sum_of
from tests.properties import cases

ONE = {"CPU": 1.0}


def test_a_sum_that_fits_may_lie_on_too_many_nodes() -> None:
    wanted = [Replica("p", (ONE, ONE, ONE))]
    assert fit(wanted, [{"CPU": 1.5}, {"CPU": 1.5}]) == Unplaced("p", ONE, {"CPU": 0.5}, proven=True)
    assert fit(wanted, [{"CPU": 2.0}, {"CPU": 1.0}]) is None


def test_large_bundles_are_not_crowded_out_by_small_ones() -> None:
    wanted = [Replica("p", (ONE, {"CPU": 1.0, "GPU": 1.0})), Replica("q", ({"CPU": 3.0},))]
    assert fit(wanted, [{"CPU": 2.0, "GPU": 1.0}, {"CPU": 3.0}]) is None


@pytest.mark.parametrize(
    ("strategy", "nodes", "fits"),
    [
        ("STRICT_PACK", [2.0, 2.0], False),
        ("STRICT_PACK", [3.0], True),
        ("STRICT_SPREAD", [3.0, 3.0], False),
        ("STRICT_SPREAD", [1.0, 1.0, 1.0], True),
        ("SPREAD", [3.0], True),
    ],
)
def test_strategies(strategy: str, nodes: list[float], fits: bool) -> None:
    replica = Replica("p", (ONE, ONE, ONE), strategy)
    assert (fit([replica], [{"CPU": amount} for amount in nodes]) is None) is fits


def test_bundles_of_different_replicas_may_lie_beside_each_other() -> None:
    pair = Replica("p", (ONE, ONE), "STRICT_SPREAD")
    assert fit([pair, pair], [{"CPU": 2.0}, {"CPU": 2.0}]) is None
    assert fit([pair, pair, pair], [{"CPU": 2.0}, {"CPU": 2.0}]) is not None


def test_what_may_be_added_counts_as_often_as_it_may_be() -> None:
    wanted = [Replica("p", (ONE, ONE, ONE), "STRICT_SPREAD")]
    types = (NodeType("a", ONE, 1), NodeType("b", {"CPU": 4.0}, -1))
    assert fit(wanted, [], Growth(types, 3)) is None
    assert fit(wanted, [], Growth(types, 2)) is not None
    assert fit(wanted, [], Growth(types[:1])) is not None
    assert fit(wanted, [ONE], Growth(types, 2)) is None


def test_nodes_that_were_added_are_not_added_again() -> None:
    growth = Growth((NodeType("a", ONE, 2), NodeType("b", {"CPU": 4.0}, 5)), 4)
    head, other = {"CPU": 1.0, HEAD_MARK: 1.0}, {"CPU": 2.0}
    left = growth.beyond([head, other, {"CPU": 1.0, "memory": 5.0}])
    assert [each.most for each in left.types] == [1, 5]
    assert left.most == left.count == 2


def test_a_search_that_takes_too_long_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "MOST_STEPS", 2)
    found = fit([Replica("p", (ONE, ONE, ONE))], [{"CPU": 1.5}, {"CPU": 1.5}])
    assert found is not None
    assert not found.proven


def fits_somehow(pieces: list[Resources], nodes: list[Resources], apart: bool) -> bool:
    """By trying all ways."""
    for places in product(range(len(nodes)), repeat=len(pieces)):
        if apart and len(set(places)) < len(places):
            continue
        used = [sum_of([piece for piece, at in zip(pieces, places, strict=True) if at == i]) for i in range(len(nodes))]
        if all(
            amount <= node.get(name, 0.0)
            for node, held in zip(nodes, used, strict=True)
            for name, amount in held.items()
        ):
            return True
    return False


resources = st.fixed_dictionaries({"CPU": st.integers(0, 4).map(float), "GPU": st.integers(0, 2).map(float)})


@cases(200)
@given(
    pieces=st.lists(resources, min_size=1, max_size=5),
    nodes=st.lists(resources, min_size=1, max_size=3),
    apart=st.booleans(),
)
def test_it_is_right_about_all_small_cases(pieces: list[Resources], nodes: list[Resources], apart: bool) -> None:
    replica = Replica("p", tuple(pieces), "STRICT_SPREAD" if apart else "PACK")
    assert (fit([replica], nodes) is None) is fits_somehow(pieces, nodes, apart)
