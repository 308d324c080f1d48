"""The law of the target holds whatever the drafts are drawn from, and breaks where that is not what is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decoding.drafters.base import Candidates
from decoding.verifiers.base import Verifier
from decoding.verifiers.rejection import RejectionVerifier
from decoding.verifiers.spectr import SpecTrVerifier
from tests.decoding.adversaries import ADVERSARIES, Drawing, Proposal, uniform
from tests.decoding.markov_rounds import SMALL, TARGET, p_value

VOCAB = len(TARGET)
VERIFIERS: dict[str, tuple[type[Verifier], Candidates]] = {
    "rejection": (RejectionVerifier, Candidates.DRAWN),
    "spectr": (SpecTrVerifier, Candidates.SEQUENCES),
}
LAWS: dict[str, dict[str, Any]] = {"raw": {}, "truncated": {"temperature": 0.6, "top_p": 0.9}}


def contrary(before: list[int]) -> torch.Tensor:
    """The less probable under the target, the more probable here."""
    odds = TARGET[before[-1]] ** -3
    return odds / odds.sum()


PROPOSALS: dict[str, Proposal] = {name: make(VOCAB) for name, make in ADVERSARIES.items()} | {"contrary": contrary}


def played(proposal: Proposal, verifier: str, runs: int, tells: Proposal | None = None, **sampling: Any) -> float:
    judge, candidates = VERIFIERS[verifier]
    return p_value(Drawing(proposal, candidates, tells), judge(), runs, SMALL, **sampling)


@pytest.mark.parametrize("verifier", list(VERIFIERS))
@pytest.mark.parametrize("name", list(PROPOSALS))
def test_no_adversary_moves_the_law(name: str, verifier: str) -> None:
    assert played(PROPOSALS[name], verifier, 500) > 1e-3


@pytest.mark.exactness
@pytest.mark.parametrize("law", list(LAWS))
@pytest.mark.parametrize("verifier", list(VERIFIERS))
@pytest.mark.parametrize("name", list(PROPOSALS))
def test_no_adversary_moves_the_law_over_200_000_runs(name: str, verifier: str, law: str) -> None:
    assert played(PROPOSALS[name], verifier, 200_000, **LAWS[law]) > 1e-4


@pytest.mark.parametrize("verifier", list(VERIFIERS))
@pytest.mark.parametrize(
    ("drawn", "told"), [(uniform(VOCAB), contrary), (contrary, uniform(VOCAB))], ids=["uniform", "contrary"]
)
def test_a_distribution_that_was_not_drawn_from_is_seen(drawn: Proposal, told: Proposal, verifier: str) -> None:
    assert played(drawn, verifier, 1_000, tells=told) < 1e-6
