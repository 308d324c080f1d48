"""Bounds on the candidates of a call, and the numbering of their answers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from turnout.candidate_sets import (
    MOST_CANDIDATES,
    MOST_CHARS,
    MOST_NODES,
    MOST_TEXT,
    CandidateSet,
    Doubt,
    GraphEdge,
    GraphNode,
    ReportedCandidate,
    TokenGraph,
    bounded,
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


def test_answers_are_numbered_over_prompts() -> None:
    given = set_of(ReportedCandidate("a", answers=(0, 2)), ReportedCandidate("b"))
    moved = given.numbered(4)
    assert (moved.answers, [each.answers for each in moved.candidates]) == ((4,), [(4, 6), ()])
    assert given.numbered(0) is given
    assert Doubt(1, "snne", 0.5).numbered(3) == replace(Doubt(1, "snne", 0.5), answer=4)
