"""The output law of every lossless verifier with every drafter that draws, over 200,000 runs each; faults are seen."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.drafters.base import Candidates, Drafter, Room
from decoding.drafters.rsd_c import PART as RSD_C
from decoding.lengths.base import LengthPolicy
from decoding.model import Model
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.rejection import RejectionVerifier
from tests.conformance.parts import ALL_DRAFTERS, LOSSLESS
from tests.decoding.markov_rounds import DRAFT, FAR, p_value

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
    "model_chain": "decoding/test_lengths.py",
    "easyspec": "decoding/test_layer_skipping_law.py",
}
DRAWING = [
    (drafter, verifier)
    for drafter, made in ALL_DRAFTERS.items()
    for verifier, judge in LOSSLESS.items()
    if made.kinds & set(judge.accepts) - {Candidates.FIXED} and verifier != "match" and drafter not in ELSEWHERE
]
LAWS: dict[str, dict[str, Any]] = {"raw": {}, "truncated": {"temperature": 0.6, "top_p": 0.9}}


def kind_for(drafter: str, verifier: str) -> Candidates:
    return next(kind for kind in LOSSLESS[verifier].accepts if kind in ALL_DRAFTERS[drafter].kinds)


@pytest.mark.exactness
@pytest.mark.parametrize("law", list(LAWS))
@pytest.mark.parametrize(("drafter", "verifier"), DRAWING)
def test_the_law_is_the_targets(drafter: str, verifier: str, law: str) -> None:
    made = ALL_DRAFTERS[drafter](candidates=kind_for(drafter, verifier))
    assert p_value(made, LOSSLESS[verifier](), RUNS, Room(2, 6), DRAFT, **LAWS[law]) > 1e-4


def test_every_drafter_that_draws_is_played() -> None:
    drawn = {name for name, made in ALL_DRAFTERS.items() if made.kinds - {Candidates.FIXED}}
    assert {drafter for drafter, _ in DRAWING} | set(ELSEWHERE) >= drawn
    for drafter, file in ELSEWHERE.items():
        text = (TESTS / file).read_text()
        assert re.search(r"def test_\w*law\w*", text)
        assert drafter in text or ALL_DRAFTERS[drafter].__name__ in text, (drafter, file)


class Faulty(Drafter):
    """A tree drafter whose proposals are tampered with."""

    kinds = frozenset({Candidates.DRAWN})

    def __init__(self, tamper: Any) -> None:
        super().__init__()
        self.tamper = tamper
        self.inner = RSD_C(candidates=Candidates.DRAWN)

    async def propose(self, model: Model, seq: Sequence, room: Room, length: LengthPolicy) -> DraftTree:
        tree = await self.inner.propose(model, seq, room, length)
        changed: DraftTree = self.tamper(tree)
        return changed


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


@pytest.mark.parametrize("tamper", [re_sorted, dropped, unnormalised])
def test_a_planted_fault_is_seen(tamper: Any) -> None:
    torch.set_num_threads(1)
    assert p_value(Faulty(tamper), RejectionVerifier(), 4_000, Room(2, 6), FAR) < 1e-6
