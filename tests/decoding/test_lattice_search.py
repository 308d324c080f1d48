"""Lattice search: merging, counting and ordering of ways, what a lattice holds, and its bounds."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from decoding.search._graph import MOST_COUNTED, Lattice
from decoding.search.base import Hypothesis
from tests.decoding.test_search import END, VOCAB, answers, every_answer, logprob, model
from turnout.errors import TurnoutError


def chain(start: Hypothesis, tokens: str) -> list[Hypothesis]:
    found = [start]
    for token in tokens:
        found.append(found[-1].child(ord(token), -1.0))
    return found[1:]


def test_merging_equal_ends_leaves_six_nodes_or_nine() -> None:
    start = Hypothesis(None)
    for zipped, nodes in ((False, 9), (True, 6)):
        lattice = Lattice(start)
        first, second = chain(start, "xabcd"), chain(start, "yabcd")
        first[-1].ended = second[-1].ended = True
        for each in (*first, *second):
            lattice.add(each)
        if zipped:
            for one, other in zip(second[1:][::-1], first[1:][::-1], strict=True):
                assert lattice.can_merge(one, other)
                lattice.merge(one, other)
        else:
            lattice.merge(second[-1], first[-1])
        assert len(lattice.in_order()) - 1 == nodes
        assert lattice.num_paths() == 2
        assert sorted("".join(chr(node.token) for node in path) for _, path in lattice.paths()) == ["xabcd", "yabcd"]
        assert not lattice.can_merge(first[0], second[0])


def test_merging_the_beginnings_of_long_answers_merges_all_that_follows() -> None:
    start = Hypothesis(None)
    lattice = Lattice(start)
    first, second = (chain(start, one + "a" + "bc" * 2000) for one in "xy")
    first[-1].ended = second[-1].ended = True
    for each in (*first, *second):
        lattice.add(each)
    lattice.merge(second[1], first[1])
    assert (len(lattice.in_order()) - 1, lattice.num_paths()) == (4003, 2)
    assert sorted(len(path) for _, path in lattice.paths()) == [4002, 4002]


def reached(lattice: Lattice, one: Hypothesis) -> set[Hypothesis]:
    found = {one}
    for each in lattice.in_order():
        if found & lattice.before[each].keys():
            found.add(each)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_what_a_node_reaches_is_known_whatever_was_merged(seed: int) -> None:
    """Merged nodes lie at different lengths, so that what follows them moves."""
    drawn, start = random.Random(seed), Hypothesis(None)
    lattice, merged = Lattice(start), 0
    for _ in range(120):
        nodes = lattice.in_order()
        one, other = drawn.choice(nodes), drawn.choice(nodes)
        if lattice.can_merge(one, other):
            lattice.merge(one, other)
            merged += 1
        elif not lattice.follows(one, token := drawn.randrange(3)):
            lattice.add(one.child(token, -1.0))
        nodes = lattice.in_order()
        assert len(nodes) == len(lattice.before)
        one = drawn.choice(nodes)
        assert {each for each in nodes if lattice.reaches(one, each)} == reached(lattice, one)
    assert merged > 5


def test_ways_are_counted_up_to_a_bound() -> None:
    start = Hypothesis(None)
    lattice, before = Lattice(start), [start]
    for _ in range(60):
        pair = [Hypothesis(before[0], token) for token in (1, 2)]
        for each in pair:
            lattice.add(each)
            for other in before[1:]:
                lattice.connect(other, each, -1.0)
        before = pair
    lattice.ends[before[0]] = None
    assert lattice.num_paths() == MOST_COUNTED


async def test_a_lattice_that_would_hold_too_much_is_refused() -> None:
    with pytest.raises(TurnoutError, match="at most 2048 with 64 branches") as caught:
        await answers(model(1), {"name": "lattice", "branches": 64, "calls": 2049})
    assert caught.value.field == "method.params.search.calls"


def spelled(report: dict[str, Any]) -> set[tuple[int, ...]]:
    """All ways through a lattice, by its edges."""
    after: dict[int, list[int]] = {}
    for one, other, _ in report["edges"]:
        after.setdefault(one, []).append(other)
    found, left = set[tuple[int, ...]](), [(0, tuple[int, ...]())]
    while left:
        here, tokens = left.pop()
        if here in report["ends"]:
            found.add(tokens)
        left += [(each, (*tokens, report["tokens"][each])) for each in after.get(here, ())]
    return found


@pytest.mark.parametrize("merge", ["zip", "one"])
@pytest.mark.parametrize("seed", range(3))
async def test_a_lattice_of_equal_lengths_holds_all_answers_those_of_the_beam_too(seed: int, merge: str) -> None:
    """A model of the last two tokens is read less often than there are beginnings: after equal ones it is the same."""
    made = model(seed + 80, sharp=1.0)
    beam, _, _ = await answers(made, n=4, width=4, max_tokens=5)
    asked = {"name": "lattice", "merge": merge, "suffix": 2, "distance": 1, "branches": VOCAB, "calls": 9999}
    found, _, request = await answers(made, asked, n=4, width=4, max_tokens=5)
    report = request.extra["lattice"]
    ways = spelled(report)
    assert len(ways) == report["paths"] == len(every_answer(5)) > report["completed"]
    assert {*map(tuple, beam)} <= ways
    best = max(every_answer(5), key=lambda each: logprob(made, each) / len(each))
    assert merge == "zip" or found[0] == best  # tokens before those that a model reads are merged by `zip` alone
    assert report["calls"] < sum(5**length for length in range(5)) / (4 if merge == "zip" else 1)


@pytest.mark.parametrize("merge", ["zip", "one"])
@pytest.mark.parametrize("seed", range(2))
async def test_a_lattice_within_a_budget_holds_more_ways_than_were_completed(seed: int, merge: str) -> None:
    made = model(seed + 80, sharp=1.0)
    [greedy], _, _ = await answers(made, width=1, max_tokens=8)
    asked = {"name": "lattice", "merge": merge, "suffix": 2, "branches": 3, "calls": 60}
    found, _, request = await answers(made, asked, n=4, width=4, max_tokens=8)
    report = request.extra["lattice"]
    ways = spelled(report)
    assert report["paths"] >= len(ways) > report["completed"]
    assert {tuple(greedy), *map(tuple, found)} <= ways
    assert report["calls"] <= 60 + 8
    assert all(each[-1] == END or len(each) == 8 for each in found)


async def test_tokens_of_an_answer_are_not_discarded_after_a_merge_either() -> None:
    """Of n answers, each node of the lattice on one of their ways that was read was written for them, once."""
    merged = 0
    for seed in range(80, 86):
        asked = {"name": "lattice", "suffix": 2, "branches": 3, "calls": 60}
        [found], [seq], request = await answers(model(seed, sharp=1.0), asked, max_tokens=8, ignore_eos=True)
        report, meter = request.extra["lattice"], seq.meter.models["large"]
        merged += len(report["edges"]) >= len(report["tokens"])
        # All but the prompt's read wrote a token; the last token of the answer is not read.
        assert meter.discarded_tokens == report["calls"] - 1 - (len(found) - 1)
    assert merged


async def test_under_a_ban_nothing_is_merged() -> None:
    asked = {"name": "lattice", "suffix": 1, "branches": 3, "calls": 60}
    _, _, request = await answers(model(81), asked, width=2, max_tokens=6, min_tokens=3)
    assert request.extra["lattice"]["paths"] == request.extra["lattice"]["completed"]


async def test_without_merging_every_way_is_an_answer_with_its_own_score() -> None:
    made = model(85)
    asked = {"name": "lattice", "distance": 0, "branches": VOCAB, "length_penalty": 0.0, "calls": 20_000}
    found, _, request = await answers(made, asked, n=3, width=3, max_tokens=3)
    every = every_answer(3)
    assert request.extra["lattice"]["paths"] == request.extra["lattice"]["completed"] == len(every)
    assert found == sorted(every, key=lambda each: -logprob(made, each))[:3]
    assert request.extra["lattice"]["edges"][0][2] <= 0.0
    assert math.isfinite(sum(edge[2] for edge in request.extra["lattice"]["edges"]))


def test_ways_come_in_the_order_of_their_log_probabilities() -> None:
    generator = torch.Generator().manual_seed(3)
    start = Hypothesis(None)
    lattice, nodes = Lattice(start), [start]
    for _ in range(12):
        parent = nodes[int(torch.randint(len(nodes), (1,), generator=generator))]
        each = parent.child(len(nodes), -float(torch.rand(1, generator=generator)))
        lattice.add(each)
        nodes.append(each)
    for each in nodes[-4:]:
        lattice.ends[each] = None
    scores = [logp for logp, _ in lattice.paths()]
    assert scores == sorted(scores, reverse=True)
