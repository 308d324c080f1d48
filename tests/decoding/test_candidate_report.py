"""What methods report of what they did not show: candidates, votes and scores, trees and lattices of hypotheses."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from decoding.aggregators.majority import Majority
from decoding.candidate_report import CANDIDATES
from decoding.fakes import ListText, pair
from decoding.model import Request
from decoding.search import _report
from decoding.search._report import text_of, tree_of, way
from decoding.search.base import Hypothesis
from decoding.sequence import Sequence
from tests.decoding.test_best_of import EOS, TEXTS, opinions
from tests.decoding.test_search import END, logprob, model
from turnout.candidate_sets import CandidateSet
from turnout.registry import get_method
from turnout.types import SamplingParams


async def drawn(seed: int, asked: bool = True, **params: Any) -> tuple[Sequence, Request]:
    made, info = opinions({1: 0.7, 2: 0.3}), get_method("best_of")
    seq = Sequence([0], SamplingParams(max_tokens=8), seed, (EOS,))
    request = Request("r", seq, candidates=asked)
    async for _ in info.run(request, pair(made, made, ListText(TEXTS)), info.parse(params)):
        pass
    return seq, request


async def searched(search: Any, seed: int, n: int = 2, **params: Any) -> tuple[CandidateSet, tuple[Sequence, ...], Any]:
    made, info = model(seed), get_method("search")
    asked = SamplingParams(temperature=0.0, max_tokens=5)
    seqs = tuple(Sequence([1, 2], asked, place, (END,)) for place in range(n))
    request = Request("r", seqs[0], answers=seqs, candidates=True)
    texts = pair(made, made, ListText([*"abcdef"]))
    async for _ in info.run(request, texts, info.parse({"search": search, **params})):
        pass
    [found] = request.extra[CANDIDATES]
    return found, seqs, (made, request)


@pytest.mark.parametrize("seed", range(4))
async def test_votes_and_scores_say_which_answer_was_taken(seed: int) -> None:
    seq, request = await drawn(seed, k=5)
    [found] = request.extra[CANDIDATES]
    assert (found.slot, found.part, found.answers, len(found.candidates)) == ("aggregators", "majority", (0,), 5)
    [taken] = [each for each in found.candidates if each.answers]
    assert taken.tokens == len(seq.generated)
    assert taken.text == "".join(TEXTS[token] for token in seq.answer if token != EOS)
    votes = Counter(each.group for each in found.candidates)
    assert {each.votes for each in found.candidates} == {1.0}
    assert votes[taken.group] == max(votes.values())
    rivals = [each.score for each in found.candidates if votes[each.group] == votes[taken.group]]
    assert taken.score == max(score for score in rivals if score is not None)
    for each in found.candidates:
        assert each.logprob is not None
        assert each.score == pytest.approx(each.logprob / each.tokens)


async def test_nothing_is_reported_unless_it_is_asked_for() -> None:
    seq, request = await drawn(1, asked=False, k=3)
    assert CANDIDATES not in request.extra
    assert seq.answer == (await drawn(1, k=3))[0].answer


async def test_answers_that_were_cancelled_say_so() -> None:
    _, request = await drawn(2, k=4, rerank="first_finish")
    [found] = request.extra[CANDIDATES]
    assert len(found.candidates) == 4
    assert {each.votes for each in found.candidates} == {None}
    [taken] = [each for each in found.candidates if each.answers]
    assert taken.ended
    assert all(each.score is None and not each.answers for each in found.candidates if not each.ended)


async def test_a_choice_that_failed_reports_no_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(self: Any, group: Any) -> int:
        group.scores, group.votes = [1.0] * 3, [1.0] * 3
        raise RuntimeError("planted")

    monkeypatch.setattr(Majority, "choose", fails)
    _, request = await drawn(3, k=3)
    [found] = request.extra[CANDIDATES]
    assert [(each.score, each.votes) for each in found.candidates] == [(None, None)] * 3
    assert sum(bool(each.answers) for each in found.candidates) == 1


@pytest.mark.parametrize("search", ["beam", "diverse", "best_first", "uid", "constrained"])
async def test_beams_are_a_tree_in_which_a_prefix_stands_once(search: str) -> None:
    found, seqs, (made, _) = await searched(search, 3, width=4)
    graph = found.graph
    assert graph is not None
    assert (found.slot, found.part, found.answers) == ("search", search, (0, 1))
    paths = [[graph.nodes[place].id for place in each.path] for each in found.candidates]
    for index, seq in enumerate(seqs):
        [shown] = [place for place, each in enumerate(found.candidates) if index in each.answers]
        assert paths[shown] == [token.id for token in seq.generated]
    prefixes = {tuple(path[: place + 1]) for path in paths for place in range(len(path))}
    assert len(graph.nodes) == 1 + len(prefixes)
    assert len(graph.edges) == len(graph.nodes) - 1
    steps = {(edge.before, edge.after): edge.logprob for edge in graph.edges}
    for each, path in zip(found.candidates, paths, strict=True):
        assert each.tokens == len(path)
        places = [0, *each.path]
        total = sum(steps[pair] for pair in pairwise(places))
        assert each.logprob == pytest.approx(total, abs=1e-4) == pytest.approx(logprob(made, path), abs=1e-4)
        assert each.path[-1] in graph.ends
        assert each.text == "".join("abcdef"[token] for token in path if token != END)
    scores = [each.score for each in found.candidates if each.score is not None]
    assert scores == sorted(scores, reverse=True)
    assert graph.paths == len(graph.ends)


async def test_a_lattice_is_reported_as_it_is_and_answers_are_ways_through_it() -> None:
    merged = 0
    for seed in range(6):
        found, _, (_, request) = await searched({"name": "lattice", "suffix": 1, "distance": 3}, seed)
        graph, report = found.graph, request.extra["lattice"]
        assert graph is not None
        assert [node.id for node in graph.nodes] == report["tokens"]
        assert [[edge.before, edge.after, edge.logprob] for edge in graph.edges] == report["edges"]
        assert (list(graph.ends), graph.paths) == (report["ends"], report["paths"])
        steps = {(edge.before, edge.after) for edge in graph.edges}
        for each in found.candidates:
            places = [0, *each.path]
            assert len(each.path) == each.tokens
            assert set(pairwise(places)) <= steps
            assert each.path[-1] in graph.ends
        merged += len(graph.edges) > len(graph.nodes) - 1
    assert merged > 1


def test_a_tree_is_no_larger_than_it_may_be_and_counts_what_is_left_out() -> None:
    start = Hypothesis(None)
    stem = start.child(1, -1.0).child(2, -1.0)
    short, long = stem.child(3, -1.0), stem.child(4, -1.0).child(5, -1.0).child(6, -1.0)
    also = long.parent.child(7, -1.0) if long.parent else start
    tree, left, paths = tree_of([short, long, also, start.child(9, -1.0)], 5)
    assert len(tree.before) == 5
    assert (left, paths) == (4, 4)
    assert [len(way(tree, each)) for each in (short, long, also)] == [3, 0, 0]
    whole, left, paths = tree_of([short, long, also], 99)
    assert (len(whole.before), left, paths) == (8, 0, 3)


async def test_long_texts_are_cut_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_report, "longest_text", lambda count: 2)
    found, _, _ = await searched({"name": "beam"}, 3, n=2, width=4)
    assert {len(each.text) for each in found.candidates} <= {0, 1, 2}
    assert [each.cut for each in found.candidates] == [
        sum(found.graph.nodes[place].id != END for place in each.path) > 2 for each in found.candidates if found.graph
    ]
    assert any(each.cut for each in found.candidates)


async def test_where_answers_repeat_each_says_which_it_is() -> None:
    found, _, _ = await searched({"name": "beam", "early_stopping": True}, 3, n=2, width=2)
    assert sorted(index for each in found.candidates for index in each.answers) == [0, 1]
    assert all(math.isfinite(edge.logprob) for edge in found.graph.edges) if found.graph else False


def test_the_text_of_half_a_character_is_its_bytes() -> None:
    class Tokens(ListText):
        def token_bytes(self, token_id: int) -> bytes:
            return [b"ab", "é".encode()[:1], "é".encode(), b"x\xc3"][token_id]

    made = [text_of(token, Tokens(["a"])) for token in range(4)]
    assert made[:3] == ["ab", "bytes:\\xc3", "é"]
    assert made[3].startswith("x")
