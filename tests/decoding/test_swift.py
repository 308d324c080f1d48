"""Seed 153 without an engine: trees as wide as the draft is unsure, what is searched for, and what that gains."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch

from decoding.drafter_state import Stores
from decoding.drafters.base import Candidates, DraftBudget
from decoding.drafters.swift import SwiftDrafter, SwiftParams
from decoding.fakes import TableModel, pair
from decoding.lengths.fixed import FixedLength
from decoding.model import Readout, ReadSpec, Request
from decoding.partial_forward import Sketch
from decoding.readout import read
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from decoding.skip_search import SkipSearch
from decoding.tree import ROOT, DraftTree
from tests.decoding.markov_rounds import now
from turnout.cost import SpeculationMeter
from turnout.registry import get_method
from turnout.types import SamplingParams

VOCAB = 12
KINDS = {Candidates.FIXED: [3, 5, 8, 10], Candidates.DRAWN: [1, 3, 5, 10]}
# One of each of the card's classes.
FALLING = (0.97, 0.9, 0.6, 0.3)


class Confident:
    """As sure of token 0 as said, place by place; the other tokens are likelier the smaller they are."""

    name = "large"
    num_layers = 6

    def __init__(self, *confidences: float) -> None:
        self.stores = Stores()
        others = torch.arange(VOCAB - 1, 0, -1.0)
        self.rows = []
        for confidence in confidences:
            probs = torch.cat([torch.tensor([confidence]), (1.0 - confidence) * others / others.sum()])
            top = tuple(enumerate(probs.log().tolist()))
            self.rows.append(Readout(token=0, probs=probs, top=top))

    async def partial_forward(self, seq: Sequence, sketch: Sketch, want: ReadSpec) -> list[Readout]:
        assert sketch.depth.skipped
        rows = self.rows[sketch.start : len(sketch.tokens)]
        return rows if want.probs else [replace(row, probs=None) for row in rows]


def drafted(model: Confident, room: DraftBudget, kind: Candidates, seed: int = 0, **params: Any) -> DraftTree:
    drafter, seq = SwiftDrafter(SwiftParams(**params), kind), Sequence([1, 2], SamplingParams(), seed)
    tree: DraftTree = now(drafter.propose(model, seq, room, FixedLength()))  # type: ignore[arg-type]
    return tree


def levels(tree: DraftTree) -> list[int]:
    depths = tree.depths()
    return [depths.count(depth) for depth in range(max(depths) + 1)]


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_less_sure_the_draft_is_the_more_candidates_stand_beside_its_token(kind: Candidates) -> None:
    model = Confident(*FALLING)
    chosen = set()
    for seed in range(20):
        tree = drafted(model, DraftBudget(4, 64), kind, seed, threshold=0.0)
        assert levels(tree) == KINDS[kind]
        parent = ROOT
        for row in model.rows:
            siblings = tree.children(parent)
            tokens = [tree.tokens[node] for node in siblings]
            assert len(set(tokens)) == len(tokens)
            # Only the chain's own token goes on; the others are leaves.
            assert not any(tree.children(node) for node in siblings[1:])
            if kind is Candidates.FIXED:
                assert tokens == list(range(len(tokens)))
                assert tree.proposal(siblings[0]) is None
            else:
                chosen.add(tokens[0])
                left = row.probs.clone()  # type: ignore[union-attr]
                for node, token in zip(siblings, tokens, strict=True):
                    torch.testing.assert_close(tree.proposal(node), left / left.sum())
                    left[token] = 0.0
            parent = siblings[0]
    assert len(chosen) > 3 or kind is Candidates.FIXED, "the chain is drawn"


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_draft_ends_below_its_first_unsure_token_which_stays(kind: Candidates) -> None:
    tree = drafted(Confident(0.99, 0.81, 0.79, 0.99), DraftBudget(25, 64), kind)
    assert levels(tree) == KINDS[kind][:3]
    assert levels(drafted(Confident(0.3, 0.99), DraftBudget(25, 64), kind)) == KINDS[kind][3:]


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_chain_has_its_room_before_the_leaves(kind: Candidates) -> None:
    """Places nearest to the text have theirs first: they are the likeliest to be reached."""
    few = levels(drafted(Confident(*FALLING), DraftBudget(4, 8), kind, threshold=0.0))
    assert few == {Candidates.FIXED: [3, 3, 1, 1], Candidates.DRAWN: [1, 3, 3, 1]}[kind]
    assert levels(drafted(Confident(*FALLING), DraftBudget(4, 3), kind, threshold=0.0)) == [1, 1, 1]


class Partial(TableModel):
    """A model of six layers some of whose sub-layers do nothing: each of the others, left out, is a wrong turn."""

    IDLE = frozenset({4, 7, 9})  # an attention and two MLPs, of a layer each

    def __init__(self, make_model: Any, per_turn: float, sharp: float = 1.0) -> None:
        super().__init__("large", lambda tokens: self.turned(tokens, 0), VOCAB)
        self.num_layers = 6
        self._whole, self._wrong = make_model("large", 2), make_model("wrong", 1)
        self._per_turn, self._sharp = per_turn, sharp

    def turned(self, tokens: list[int], turns: int) -> torch.Tensor:
        """Logits after so many wrong turns."""
        off = self._per_turn * turns * self._wrong.next_logits(tokens)
        logits: torch.Tensor = self._sharp * (self._whole.next_logits(tokens) + off)
        return logits

    async def partial_forward(self, seq: Sequence, sketch: Sketch, want: ReadSpec) -> list[Readout]:
        turns = len(sketch.depth.skipped - self.IDLE)
        text = [*seq.tokens[: sketch.base], *sketch.tokens]
        ends = range(sketch.base + sketch.start + 1, len(text) + 1)
        logits = torch.stack([self.turned(text[:end], turns) for end in ends])
        return read(logits, [RowContext(seq, tuple(text[len(seq) : end])) for end in ends], [want] * len(ends))


async def written(model: TableModel, tenant: str, seed: int, max_tokens: int, **params: Any) -> SpeculationMeter:
    """What one greedy answer took, drafted by parts of the model itself."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    seq = Sequence([seed % VOCAB, seed // VOCAB], sampling, seed, tenant=tenant)
    info, models = get_method("speculative"), pair(model, model)
    async for _ in info.run(Request("r", seq), models, info.parse(params)):
        pass
    return seq.meter.speculation


async def test_acceptance_rises_over_a_tenants_first_tens_of_requests(make_model: Any) -> None:
    """What one request found, the next one drafts with; another tenant begins anew."""
    model = Partial(make_model, per_turn=0.8)

    async def acceptance(tenant: str, seeds: range) -> float:
        drafter = {"name": "swift", "context": 16, "threshold": 0.0}
        # As many nodes as levels: chains, so that no leaf hides what the chain got wrong.
        spent = [await written(model, tenant, seed, 22, drafter=drafter, nodes=3, draft_length=3) for seed in seeds]
        return sum(each.accepted_tokens for each in spent) / sum(each.draft_tokens for each in spent)

    first = await acceptance("one", range(6))
    await acceptance("one", range(6, 16))
    assert await acceptance("one", range(6)) > first + 0.5
    assert await acceptance("other", range(6)) == first


async def test_a_draft_is_25_tokens_deep_at_most(make_model: Any) -> None:
    model = Partial(make_model, per_turn=0.0, sharp=50.0)
    meter = await written(model, "one", 1, 60, drafter="swift")
    assert len(meter.accepted_at) == len(meter.drafted_at) == 25
    assert meter.accepted_at[-1] >= 2


def test_the_first_set_is_every_second_layer_and_later_ones_split_layers() -> None:
    """Nine of the twenty sub-layers between the first and the last layer, attentions and MLPs apart."""
    search = SkipSearch(12, 0.45)
    assert search.best == search.propose() == {2, 3, 6, 7, 10, 11, 14, 15, 18}
    kinds, seen = set(), set()
    for _ in range(24):
        tried = search.propose()
        assert len(tried) == 9
        assert min(tried) >= 2
        assert max(tried) <= 21
        pairs = [(2 * layer in tried, 2 * layer + 1 in tried) for layer in range(1, 11)]
        kinds |= set(pairs)
        seen.add(tried)
        search.report(tried, 0.5)
    assert kinds == {(False, False), (True, False), (False, True), (True, True)}
    assert len(seen) > 20


def trials_until_done(scores: Any) -> int:
    search, trials = SkipSearch(12, 0.45), 0
    sets = combinations(range(2, 22), 9)
    while not search.done:
        search.report(frozenset(next(sets)), scores(trials))
        trials += 1
    return trials


def test_the_search_ends_when_it_is_good_enough_or_has_tried_long_enough() -> None:
    assert trials_until_done(lambda trial: 0.95 if trial < 3 else 0.951) == 4
    assert trials_until_done(lambda trial: 0.5) == 1 + 300
    assert trials_until_done(lambda trial: trial / 2_000) == 1_000


def test_one_text_that_any_set_predicts_does_not_end_the_search_for_good() -> None:
    search = SkipSearch(12, 0.45)
    search.report(search.propose(), 0.6)
    lucky = search.propose()
    search.report(lucky, 1.0)  # a text that repeats itself
    assert (search.best, search.done) == (lucky, True)
    assert search.doubtful
    for score in (0.4, 0.5, 0.5):
        search.check(lucky, score)
    assert search.score == pytest.approx(0.6)
    assert not search.done
    better = search.propose()
    search.report(better, 0.8)
    assert search.best == better
    search.check(lucky, 1.0)  # of a request that began with the other
    assert search.score == 0.8


def test_a_set_that_is_found_worse_makes_room_for_the_next_best() -> None:
    search = SkipSearch(12, 0.45)
    good, lucky = (frozenset(range(first, first + 9)) for first in (2, 3))
    search.report(good, 0.9)
    search.report(lucky, 1.0)
    assert search.best == lucky
    search.check(lucky, 0.2)
    assert (search.best, search.score) == (good, 0.9)
    assert search._scores == [0.9, pytest.approx(0.6)], "the process learns from the mean"
    assert search.doubtful
    search.check(good, 0.1)
    assert (search.best, search.score) == (lucky, pytest.approx(0.6))
    search.report(lucky, 0.0)
    assert (search.best, search.score) == (good, pytest.approx(0.5)), "a set that is tried again has one score"


def test_a_change_of_the_set_in_use_opens_a_search_that_lacked_gain_but_not_one_of_enough_trials() -> None:
    for limits, reopened in (({"most_without_gain": 3}, True), ({"most_trials": 5}, False)):
        search = SkipSearch(12, 0.45, **limits)
        good, lucky, *others = (frozenset(range(first, first + 9)) for first in range(2, 7))
        search.report(good, 0.8)
        search.report(lucky, 0.9)
        for other in others:
            search.report(other, 0.1)
        assert search.done
        search.check(lucky, 0.2)
        assert search.best == good
        assert search.done is not reopened


def test_a_set_that_was_scored_on_the_text_before_is_a_trial_without_a_score() -> None:
    search = SkipSearch(12, 0.45, most_without_gain=2)
    first = search.propose()
    search.report(first, 0.5)
    search.report(first, None)
    assert (search.score, search.done) == (0.5, False)
    search.check(first, 0.7)
    assert search.score == pytest.approx(0.6)
    search.report(first, None)
    assert search.done


async def test_one_text_is_not_read_twice_for_one_set(make_model: Any) -> None:
    """Of three layers one of two sub-layers is skipped: two sets, and many rounds."""
    large = Partial(make_model, 0.0)
    large.num_layers = 3
    seq = Sequence([1, 2], SamplingParams(max_tokens=12), 0)
    await large.decode(seq)
    drafter, search = SwiftDrafter(SwiftParams(context=4, skipped=0.5)), SkipSearch(3, 0.5)
    for _ in range(10):
        await drafter._try_one(large, seq, search)
    assert search._num_trials == 10
    assert search._texts == [1, 1]


def test_the_set_in_use_is_checked_a_few_times_and_what_holds_ends_the_search() -> None:
    search = SkipSearch(12, 0.45)
    assert not search.doubtful
    search.report(search.propose(), 0.98)
    checks = 0
    while search.doubtful:
        search.check(search.best, 0.97)
        checks += 1
    assert (search.done, checks) == (True, 7)


async def test_a_later_request_checks_what_an_earlier_one_found(make_model: Any) -> None:
    """The search of the tenant has ended on a set that scored 1.0 once; the next answers find it worse."""
    large = Partial(make_model, 2.0)
    search = SkipSearch(large.num_layers, 0.45)
    search.report(search.propose(), 1.0)
    found = search.best
    large.stores.open("swift/0.45", Sequence([1, 2], SamplingParams(), 0).learner, lambda: search)
    info = get_method("speculative")
    params = info.parse({"drafter": {"name": "swift", "context": 4}, "draft_length": 4})
    for seed in range(3):
        seq = Sequence([1, 2], SamplingParams(max_tokens=16), seed)
        async for _ in info.run(Request("r", seq), pair(large, large), params):
            pass
    assert search.score < 0.95 or search.best != found
