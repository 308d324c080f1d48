"""Bounds on the candidates of a call, and the numbering of their answers."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise

import pytest

from turnout.candidate_sets import (
    MOST_CANDIDATES,
    MOST_CHARS,
    MOST_EDGES,
    MOST_NODES,
    MOST_PLACES,
    MOST_TEXT,
    CandidateSet,
    Doubt,
    GraphEdge,
    GraphNode,
    ReportedCandidate,
    TokenGraph,
    bounded,
    values_of,
)


def set_of(*candidates: ReportedCandidate, graph: TokenGraph | None = None) -> CandidateSet:
    return CandidateSet("aggregators", "majority", "a rule", "nats", (0,), candidates, graph=graph)


def chains(count: int, length: int) -> CandidateSet:
    """Hypotheses that part at once, as a tree; the last one is shown."""
    nodes, edges, candidates = [GraphNode(-1, "")], [], []
    for index in range(count):
        path = tuple(range(len(nodes), len(nodes) + length))
        edges += [GraphEdge(before, after, -1.0) for before, after in pairwise((0, *path))]
        nodes += [GraphNode(place, "t") for place in path]
        shown = (0,) if index == count - 1 else ()
        candidates.append(ReportedCandidate("t" * length, length, answers=shown, path=path))
    ends = tuple(each.path[-1] for each in candidates)
    return set_of(*candidates, graph=TokenGraph(tuple(nodes), tuple(edges), ends, count))


def test_what_is_within_the_bounds_stays_as_it_is() -> None:
    found = (set_of(ReportedCandidate("a", answers=(0,)), ReportedCandidate("b")), chains(3, 4))
    assert bounded(found) == found
    assert bounded([]) == ()


@pytest.mark.parametrize("sets", [1, 3, 128])
def test_candidates_and_characters_of_a_call_are_bounded(sets: int) -> None:
    long = ReportedCandidate("x" * 9000, group="y" * 9000)
    many = set_of(*[long] * 64, ReportedCandidate("z", answers=(0,)))
    found = bounded([many] * sets)
    candidates = [each for one in found for each in one.candidates]
    assert len(candidates) <= MOST_CANDIDATES
    assert sum(len(each.text) for each in candidates) <= MOST_CHARS
    assert max(len(each.text) for each in candidates) <= MOST_TEXT
    for one in found:
        assert len(one.candidates) + one.omitted == 65
        assert [each.text for each in one.candidates if each.answers] == ["z"], "what is shown is not left out"
        assert all(each.cut == (each.text != "z") for each in one.candidates)


def test_a_graph_that_is_too_large_keeps_the_paths_of_what_is_shown() -> None:
    whole = chains(10, MOST_NODES // 8)
    [found] = bounded([whole])
    graph = found.graph
    assert graph is not None
    assert whole.graph is not None
    assert len(graph.nodes) <= MOST_NODES
    assert len(graph.nodes) + graph.omitted == len(whole.graph.nodes)
    assert (graph.nodes[0].id, graph.paths) == (-1, 10)
    kept = [each for each in found.candidates if each.path]
    assert [each.answers for each in kept][-1] == (0,)
    assert 0 < len(kept) < 10
    steps = {(edge.before, edge.after) for edge in graph.edges}
    for each in kept:
        places = (0, *each.path)
        assert set(pairwise(places)) <= steps
        assert each.path[-1] in graph.ends
        before = whole.candidates[found.candidates.index(each)].path
        assert tuple(graph.nodes[place].id for place in each.path) == before


def test_what_is_shown_stays_though_there_is_much_of_it() -> None:
    shown = [ReportedCandidate("x", answers=(index,)) for index in range(64)]
    found = bounded([set_of(*shown, *[ReportedCandidate("y")] * 64)] * 20)
    assert [(len(each.candidates), each.omitted) for each in found] == [(64, 64)] * 20
    assert all(each.answers for one in found for each in one.candidates)


def test_paths_and_edges_are_bounded_of_hypotheses_that_part_late() -> None:
    length, count = 2000, 1000
    nodes = tuple(GraphNode(place - 1, "t") for place in range(length + count))
    shared = tuple(range(1, length))
    edges = [GraphEdge(before, after, -1.0) for before, after in pairwise((0, *shared))]
    edges += [GraphEdge(length - 1, length + place, -1.0) for place in range(count)]
    edges += [GraphEdge(before, length - 1, -9.0) for before in range(length - 2)] * 8  # as in a lattice
    candidates = [
        ReportedCandidate("t", length, answers=(0,) if place == count - 1 else (), path=(*shared, length + place))
        for place in range(count)
    ]
    ends = tuple(range(length, length + count))
    whole = set_of(*candidates, graph=TokenGraph(nodes, tuple(edges), ends, count))
    [found] = bounded([whole])
    graph = found.graph
    assert graph is not None
    assert sum(len(each.path) for each in found.candidates) <= MOST_PLACES
    assert len(graph.edges) <= MOST_EDGES < len(edges)
    assert (len(graph.nodes), len(found.candidates), found.omitted) == (len(nodes), count, 0)
    assert found.candidates[-1].path == candidates[-1].path, "of what is shown"
    assert found.candidates[0].path == candidates[0].path
    steps = {(edge.before, edge.after) for edge in graph.edges}
    assert all(step in steps for each in found.candidates for step in pairwise((0, *each.path)) if each.path)
    assert bounded([found]) == (found,)


def test_values_are_those_of_asdict() -> None:
    for each in (chains(2, 3), Doubt(1, "snne", 0.5, limit=0.7), set_of(ReportedCandidate("a", votes=1.0))):
        assert json.dumps(values_of(each)) == json.dumps(asdict(each))


def test_answers_are_numbered_over_prompts() -> None:
    given = set_of(ReportedCandidate("a", answers=(0, 2)), ReportedCandidate("b"))
    moved = given.numbered(4)
    assert (moved.answers, [each.answers for each in moved.candidates]) == ((4,), [(4, 6), ()])
    assert given.numbered(0) is given
    assert Doubt(1, "snne", 0.5).numbered(3) == replace(Doubt(1, "snne", 0.5), answer=4)
