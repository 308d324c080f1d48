"""Speculative Jacobi decoding: guesses judged against the distribution of the round before, and the law they keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from decoding.drafters.base import Candidates, DraftBudget
from decoding.drafters.jacobi import JacobiDrafter, JacobiParams
from decoding.drafters.model_chain import ModelChainDrafter
from decoding.fakes import TableModel
from decoding.lengths.fixed import FixedLength
from decoding.model import Readout
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.rejection import RejectionVerifier
from tests.decoding.many_runs import many_runs
from tests.decoding.markov_rounds import POSITIONS, TARGET, Readings, now, processed
from turnout.types import SamplingParams

LENGTH = FixedLength()


def drawn(window: int = 4) -> JacobiDrafter:
    return JacobiDrafter(JacobiParams(window=window), Candidates.DRAWN)


def play(rows: list[Readout], seed: int, change: Callable[[DraftTree], DraftTree]) -> list[int]:
    """Rounds from token 0 until three tokens stand; the drafter learns from the rows of every round."""
    seq, drafter, model = (
        Sequence([0], SamplingParams(max_tokens=64), seed),
        drawn(),
        TableModel("m", lambda _: None, 3),
    )
    while len(seq) <= POSITIONS:
        tree = change(now(drafter.propose(model, seq, DraftBudget(4, 4), LENGTH)))
        read = [rows[seq.tokens[-1]], *(rows[token] for token in tree.tokens)]
        verdict = replace(RejectionVerifier().judge(seq, tree, read, "m"), rows=read)
        seq.extend(verdict.tokens, {"m": 0})
        drafter.observe(model, seq, tree, verdict)
    return seq.tokens[1 : POSITIONS + 1]


@many_runs()
def p_value(runs: int, change: Callable[[DraftTree], DraftTree] = lambda tree: tree, **sampling: Any) -> float:
    table = processed(TARGET, **sampling)
    rows = [Readout(probs=row) for row in table]
    outcomes = np.array([play(rows, seed, change) for seed in range(runs)])
    counts = np.bincount(outcomes @ (3 ** np.arange(POSITIONS)[::-1]), minlength=3**POSITIONS)
    law = (table[0][:, None, None] * table[:, :, None] * table[None]).reshape(-1).double().numpy()
    assert not counts[law == 0].any()
    return float(stats.chisquare(counts[law > 0], law[law > 0] / law.sum() * runs).pvalue)


# Whatever stands before, the small model draws the third token most often: the same noise draws it again.
ALIKE = torch.tensor([[0.2, 0.2, 0.6]] * 3)


def after_a_chain(rows: list[Readout], small: Readings, seed: int, choosy: bool) -> list[int]:
    """As `play`, but a model's chain drafts the first round, and after a rejection it is the turn of the guesses.

    Args:
        choosy: whether they have it only where the chain drew the last token behind what was rejected.
    """
    seq = Sequence([0], SamplingParams(max_tokens=64), seed)
    chain, guesses, turn = ModelChainDrafter(candidates=Candidates.DRAWN), drawn(2), "chain"
    while len(seq) <= POSITIONS:
        tree = DraftTree.empty("large")
        if turn != "nobody":
            drafter = chain if turn == "chain" else guesses
            tree = now(drafter.propose(small, seq, DraftBudget(2, 2), LENGTH))  # type: ignore[arg-type]
        read = [rows[seq.tokens[-1]], *(rows[token] for token in tree.tokens)]
        verdict = replace(RejectionVerifier().judge(seq, tree, read, "large"), rows=read)
        seq.extend(verdict.tokens, {"small": 0, "large": 0})
        guesses.observe(small, seq, tree, verdict)  # type: ignore[arg-type]
        rejected = turn == "chain" and verdict.num_accepted_tokens == 0
        turn = ("guesses" if not choosy or tree.tokens[1] == 2 else "nobody") if rejected else "chain"
    return seq.tokens[1 : POSITIONS + 1]


@pytest.mark.parametrize("choosy", [False, True])
def test_who_drafts_next_may_depend_on_what_another_drafted_and_nobody_saw(choosy: bool) -> None:
    """Selectors that go by time choose so; guesses that are drawn anew must not share the other's noise."""
    torch.set_num_threads(1)
    table = processed(TARGET)
    rows, small = [Readout(probs=row) for row in table], Readings(processed(ALIKE))
    outcomes = np.array([after_a_chain(rows, small, seed, choosy) for seed in range(2_000)])
    counts = np.bincount(outcomes @ (3 ** np.arange(POSITIONS)[::-1]), minlength=3**POSITIONS)
    law = (table[0][:, None, None] * table[:, :, None] * table[None]).reshape(-1).double().numpy()
    assert float(stats.chisquare(counts, law / law.sum() * 2_000).pvalue) > 1e-3


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "top_p": 0.9}], ids=["raw", "top_p"])
def test_the_target_law_is_kept(sampling: dict[str, Any]) -> None:
    assert p_value(1_500, **sampling) > 1e-3


@pytest.mark.exactness
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "top_p": 0.9}], ids=["raw", "top_p"])
def test_the_target_law_is_kept_over_many_runs(sampling: dict[str, Any]) -> None:
    assert p_value(200_000, **sampling) > 1e-3


def test_a_planted_fault_is_caught() -> None:
    """Guesses judged as if drawn from another place's distribution."""

    def shifted(tree: DraftTree) -> DraftTree:
        return replace(tree, proposals=tuple(q if q is None else q.roll(1) for q in tree.proposals))

    assert p_value(1_500, shifted) < 1e-6


async def test_a_fresh_guess_repeats_its_neighbour_and_counts_as_chosen() -> None:
    model, seq = TableModel("m", lambda _: torch.zeros(9), 9), Sequence([3, 5], SamplingParams(), 0)
    tree = await drawn(3).propose(model, seq, DraftBudget(8, 8), LENGTH)
    assert (tree.tokens, tree.proposals, tree.is_chain) == ((5, 5, 5), (None, None, None), True)


async def test_what_was_not_reached_is_redrawn_from_what_the_target_said_there(make_model: Any) -> None:
    model, seq, drafter = make_model("m", 3), Sequence([1, 2], SamplingParams(), 4), drawn(5)
    tree = await drafter.propose(model, seq, DraftBudget(8, 8), LENGTH)
    verdict = await model.verify(seq, tree, RejectionVerifier(), drafter.want)
    seq.extend(verdict.tokens, {"m": 0})
    drafter.observe(model, seq, tree, verdict)
    again = await drafter.propose(model, seq, DraftBudget(8, 8), LENGTH)
    left = 5 - len(verdict.path)
    assert left > 0
    for index in range(left):
        proposal = again.proposal(index)
        assert proposal is not None
        assert proposal.equal(verdict.rows[len(verdict.path) + 1 + index].probs)
        assert proposal[again.tokens[index]] > 0
    assert set(again.proposals[left:]) <= {None}


async def test_where_context_does_not_matter_every_redrawn_guess_is_accepted() -> None:
    logits = torch.randn(7, generator=torch.Generator().manual_seed(1))
    model, drafter = TableModel("m", lambda _: logits, 7), drawn(5)
    seq, redrawn = Sequence([3], SamplingParams(max_tokens=200), 4), 0
    while not seq.finished:
        tree = await drafter.propose(model, seq, DraftBudget(8, 8), LENGTH)
        verdict = await model.verify(seq, tree, RejectionVerifier(), drafter.want)
        count = sum(proposal is not None for proposal in tree.proposals)
        assert len(verdict.path) >= count
        redrawn += count
        seq.extend(verdict.tokens, {"m": 0})
        drafter.observe(model, seq, tree, verdict)
    assert redrawn > 50


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 3, "frequency_penalty": 0.5}]
)
async def test_output_is_plain_decoding(run: Any, make_model: Any, sampling: dict[str, Any]) -> None:
    models = make_model("small", 1), make_model("large", 2, scale=5.0)
    accepted = 0
    for seed in range(8):
        plain = await run("plain", *models, seed=seed, max_tokens=40, **sampling)
        drafted = await run("speculative", *models, {"drafter": "jacobi"}, seed=seed, max_tokens=40, **sampling)
        assert drafted.ids == plain.ids
        accepted += drafted.seq.meter.speculation.accepted_tokens
    assert accepted > 0


async def test_greedy_rejection_is_plain_jacobi(run: Any, make_model: Any) -> None:
    models = make_model("small", 1), make_model("large", 2, scale=5.0)
    for seed in range(8):
        plain = await run("plain", *models, prompt=(seed % 12, 2), temperature=0, max_tokens=40)
        fixed, sampled = [
            await run(
                "speculative", *models, {"drafter": "jacobi", "verifier": verifier}, prompt=(seed % 12, 2),
                temperature=0, max_tokens=40,
            )
            for verifier in ("match", "rejection")
        ]  # fmt: skip
        assert fixed.ids == sampled.ids == plain.ids
        assert [len(s.tokens) for s in fixed.segments] == [len(s.tokens) for s in sampled.segments]
