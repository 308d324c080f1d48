"""The output law of every lossless verifier with every drafter that draws, over 200,000 runs each; faults are seen."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.drafters.rsd_c import PART as RSD_C
from decoding.lengths.base import LengthPolicy
from decoding.model import Model
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult
from decoding.verifiers.rejection import RejectionVerifier
from tests.conformance.parts import ALL_DRAFTERS, LOSSLESS
from tests.decoding.markov_rounds import DRAFT, FAR, POSITIONS, p_value

RUNS = 200_000
TESTS = Path(__file__).parents[1]
# What needs a model's layers, or reads the target's own rows, is played over as many runs by other tests.
ELSEWHERE = {
    "clasp": "decoding/test_layer_skipping_law.py",
    "swift": "decoding/test_layer_skipping_law.py",
    "del": "decoding/test_early_exit_drafters.py",
    "eesd": "decoding/test_early_exit_drafters.py",
    "kangaroo": "decoding/test_early_exit_drafters.py",
    "jacobi": "decoding/test_jacobi.py",
    "easyspec": "decoding/test_layer_skipping_law.py",
}
DRAWING = [
    (drafter, verifier)
    for drafter, made in ALL_DRAFTERS.items()
    for verifier, judge in LOSSLESS.items()
    if made.kinds & set(judge.accepts) - {Candidates.FIXED} and verifier != "match" and drafter not in ELSEWHERE
]
# Where a default would leave nothing to do on three tokens.
SETTINGS: dict[str, dict[str, Any]] = {"vocab_trim": {"keep": 2}}
LAWS: dict[str, dict[str, Any]] = {"raw": {}, "truncated": {"temperature": 0.6, "top_p": 0.9}}


def kind_for(drafter: str, verifier: str) -> Candidates:
    return next(kind for kind in LOSSLESS[verifier].accepts if kind in ALL_DRAFTERS[drafter].kinds)


def law_p_value(drafter: str, verifier: str, law: str, runs: int) -> float:
    part = ALL_DRAFTERS[drafter]
    made = part(part.Params(**SETTINGS.get(drafter, {})), kind_for(drafter, verifier))
    return p_value(made, LOSSLESS[verifier](), runs, DraftBudget(2, 6), DRAFT, **LAWS[law])


@pytest.mark.exactness
@pytest.mark.parametrize("law", list(LAWS))
@pytest.mark.parametrize(("drafter", "verifier"), DRAWING)
def test_the_law_is_the_targets(drafter: str, verifier: str, law: str) -> None:
    assert law_p_value(drafter, verifier, law, RUNS) > 1e-3


@pytest.mark.parametrize("law", list(LAWS))
@pytest.mark.parametrize(("drafter", "verifier"), DRAWING)
def test_every_such_game_can_be_played(drafter: str, verifier: str, law: str) -> None:
    """A few runs of each, with every test run: that the many are possible at all."""
    torch.set_num_threads(1)
    assert law_p_value(drafter, verifier, law, 200) > 1e-4


def test_every_drafter_that_draws_is_played() -> None:
    drawn = {name for name, made in ALL_DRAFTERS.items() if made.kinds - {Candidates.FIXED}}
    assert {drafter for drafter, _ in DRAWING} | set(ELSEWHERE) >= drawn
    for drafter, file in ELSEWHERE.items():
        text = (TESTS / file).read_text()
        assert re.search(r"@pytest\.mark\.exactness\n(@.*\n)*def test_\w*law\w*", text), file
        assert f"import {ALL_DRAFTERS[drafter].__name__}" in text or f'load(PACKAGE, "{drafter}"' in text, file


class Faulty(Drafter):
    """A tree drafter whose proposals are tampered with."""

    kinds = frozenset({Candidates.DRAWN})

    def __init__(self, tamper: Any) -> None:
        super().__init__()
        self.tamper = tamper
        self.inner = RSD_C(candidates=Candidates.DRAWN)

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        tree = await self.inner.propose(model, seq, room, length)
        changed: DraftTree = self.tamper(tree)
        return changed


class Choosy(Drafter):
    """Leaves a round out by what was drafted behind the last round's rejection.

    Selectors that go by time do so: a policy that looks at tokens makes rounds longer behind some than behind others.
    """

    kinds = frozenset({Candidates.DRAWN})

    def __init__(self, inner: Drafter) -> None:
        super().__init__()
        self.inner = inner
        self.out = False

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        if self.out:
            return DraftTree.empty("small")
        return await self.inner.propose(model, seq, room, length)

    def observe(self, model: Model, seq: Sequence, draft: DraftTree, verdict: VerifyResult) -> None:
        unseen = [token for token, depth in zip(draft.tokens, draft.depths(), strict=True) if depth == 1]
        ended = len(seq) > POSITIONS  # another run begins
        self.out = not ended and verdict.num_accepted_tokens == 0 and unseen[:1] not in ([], [2])


def re_sorted(tree: DraftTree) -> DraftTree:
    """The root's children by their token, their subtrees left out."""
    order = sorted(tree.children(-1), key=lambda node: tree.tokens[node])
    proposals = tuple(tree.proposal(node) for node in order)
    return DraftTree(tuple(tree.tokens[node] for node in order), (-1,) * len(order), tree.source, proposals)


def dropped(tree: DraftTree) -> DraftTree:
    """Without the root's children that are improbable."""
    kept = [n for n in tree.children(-1) if float(tree.proposals[n][tree.tokens[n]]) > 0.3]  # type: ignore[index]
    proposals = tuple(tree.proposal(node) for node in kept)
    return DraftTree(tuple(tree.tokens[node] for node in kept), (-1,) * len(kept), tree.source, proposals)


def unnormalised(tree: DraftTree) -> DraftTree:
    """Later siblings keep the first one's distribution."""
    first = {parent: tree.proposal(tree.children(parent)[0]) for parent in set(tree.parents)}
    return replace(tree, proposals=tuple(first[parent] for parent in tree.parents))


# Whatever stands before: the same noise draws the same token again.
ALIKE = torch.tensor([[0.2, 0.2, 0.6]] * 3)


@pytest.mark.parametrize("name", ["model_chain", "rsd_c", "rsd_s"])
def test_rounds_may_be_chosen_by_tokens_that_nobody_judged(name: str) -> None:
    """A place that is drafted again is drawn with other noise: what chose the round says nothing of it."""
    torch.set_num_threads(1)
    inner = ALL_DRAFTERS[name](candidates=Candidates.DRAWN)
    assert p_value(Choosy(inner), RejectionVerifier(), 2_500, DraftBudget(2, 6), ALIKE) > 1e-3


@pytest.mark.parametrize("tamper", [re_sorted, dropped, unnormalised])
def test_a_planted_fault_is_seen(tamper: Any) -> None:
    torch.set_num_threads(1)
    assert p_value(Faulty(tamper), RejectionVerifier(), 2_000, DraftBudget(2, 6), FAR) < 1e-6
