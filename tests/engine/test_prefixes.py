"""Prefixes that sequences of a batch share are found from the block tables: all that pay, and no others."""

from __future__ import annotations

from hypothesis import given

from engine.attention.prefixes import find_prefixes
from tests.engine.families import Family, Member, families
from tests.properties import cases


def test_two_levels_are_two_nodes() -> None:
    family = Family(((-1, 5), (0, 3)), (Member(1, 2), Member(0), Member(1), Member(-1, 40), Member(0, 9)))
    found = find_prefixes(family.layout(), 1, 1)
    assert found is not None
    keys = [(int(node["begin_key"]), int(node["end_key"]), int(node["parent"])) for node in found.nodes]
    assert keys == [(0, 20, -1), (20, 32, 0)]
    assert [int(node["end"] - node["first"]) for node in found.nodes] == [4, 2]
    assert found.leaves.tolist() == [1, 0, 1, -1, 0]


def test_nothing_shared_is_nothing() -> None:
    family = Family(((-1, 40),), (Member(0), *(Member(-1, 100) for _ in range(5))))
    assert find_prefixes(family.layout(), 1, 1) is None


def test_a_run_that_does_not_pay_is_left_alone() -> None:
    family = Family(((-1, 15),), (Member(0), Member(0), Member(0)))
    assert find_prefixes(family.layout(), 60, 120) is not None
    assert find_prefixes(family.layout(), 61, 120) is None
    assert find_prefixes(family.layout(), 60, 121) is None


def test_blocks_of_a_run_that_does_not_pay_belong_to_the_runs_inside() -> None:
    family = Family(((-1, 2), (0, 10), (0, 10)), (Member(1), Member(1), Member(2), Member(2)))
    found = find_prefixes(family.layout(), 9, 1)
    assert found is not None
    assert sorted((int(n["begin_key"]), int(n["end_key"]), int(n["parent"])) for n in found.nodes) == [
        (0, 48, -1),
        (0, 48, -1),
    ]


def test_blocks_that_a_member_still_writes_to_are_its_own() -> None:
    # The third holds the same blocks, but computes the last four tokens of the run again.
    layout = Family(((-1, 10),), (Member(0, 5), Member(0, 5), Member(0))).layout()
    layout.lengths[2] = 37
    found = find_prefixes(layout, 1, 1)
    assert found is not None
    assert [(int(n["begin_key"]), int(n["end_key"])) for n in found.nodes] == [(0, 36), (36, 40)]
    assert found.leaves.tolist() == [1, 1, 0]


@given(family=families())
@cases(150)
def test_every_block_is_read_once_and_every_path_is_whole(family: Family) -> None:
    layout = family.layout()
    found = find_prefixes(layout, 1, 1)
    size = layout.block_size
    own = [max(m.fed, m.nodes) for m in family.members]
    whole = [(int(length) - mine) // size for length, mine in zip(layout.lengths, own, strict=True)]
    prefixes = [tuple(layout.blocks[b, :count].tolist()) for b, count in enumerate(whole)]
    distinct = {path[:end] for path in prefixes for end in range(1, len(path) + 1)}
    read = sum(whole)
    for node in [] if found is None else found.nodes:
        below = [b for b in range(len(own)) if node["first"] <= found.places[b] < node["end"] and found.leaves[b] >= 0]
        begin, end = int(node["begin_key"]), int(node["end_key"])
        assert len({prefixes[b][: end // size] for b in below}) == 1
        assert min(len(prefixes[b]) for b in below) * size >= end
        assert begin == (0 if node["parent"] < 0 else found.nodes[node["parent"]]["end_key"])
        rows = [r for b in below for r in range(layout.starts[b], layout.starts[b + 1])]
        assert sorted(found.rows[node["first"] : node["end"]].tolist()) == rows
        read -= (len(below) - 1) * (end - begin) // size
    assert read == len(distinct)
