"""K-SEQ against the card's numbers, the token-level optimum and the target's law."""

from itertools import product

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from decoding.drafters.base import Candidates, DraftBudget
from decoding.drafters.model_sequences import ModelSequencesDrafter, ModelSequencesParams
from decoding.model import Readout
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.rejection import RejectionVerifier
from decoding.verifiers.spectr import SpecTrVerifier, accept_probability, least_ratio, what_is_left
from tests.decoding.markov_rounds import FAR, p_value
from turnout.types import SamplingParams, TokenKind

P, Q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])


def acceptance(p: torch.Tensor, q: torch.Tensor, count: int) -> float:
    rho = least_ratio(p, q, count)
    return accept_probability(float(torch.minimum(q, p / rho).sum()), count)


def test_the_worked_examples():
    p, q = torch.tensor([0.9, 0.1]), torch.tensor([0.5, 0.5])
    rho = least_ratio(p, q, 2)
    assert rho == pytest.approx(1.43007, abs=1e-5)
    assert float(torch.minimum(q, p / rho).sum()) == pytest.approx(0.56993, abs=1e-5)
    assert acceptance(p, q, 2) == pytest.approx(0.81504, abs=1e-5)
    assert acceptance(p, q, 1) == pytest.approx(0.6)
    assert [acceptance(P, Q, count) for count in (1, 2, 4)] == pytest.approx([0.7, 0.7914, 0.9060], abs=1e-4)


def output_law(p: torch.Tensor, q: torch.Tensor, count: int) -> torch.Tensor:
    """Law of the emitted token, summed over all draws."""
    rho = least_ratio(p, q, count)
    law, refused = torch.zeros_like(p), 0.0
    for tokens in product(range(len(p)), repeat=count):
        reached = float(torch.stack([q[token] for token in tokens]).prod())
        for token in tokens:
            share = min(1.0, float(p[token] / (rho * q[token]))) if q[token] > 0 else 0.0
            law[token] += reached * share
            reached *= 1.0 - share
        refused += reached
    return law + refused * what_is_left(p, q, rho, count)


def optimum(p: torch.Tensor, q: torch.Tensor, count: int) -> float:
    """The most any rule can accept: optimal transport from draws to tokens (a linear program)."""
    draws = list(product(range(len(p)), repeat=count))
    chances = [float(np.prod([float(q[token]) for token in tokens])) for tokens in draws]
    pairs = [(row, token) for row in range(len(draws)) for token in range(len(p))]
    gain = [-float(token in draws[row]) for row, token in pairs]
    equal = [[float(row == each) for row, _ in pairs] for each in range(len(draws))]
    equal += [[float(token == each) for _, token in pairs] for each in range(len(p))]
    solved = linprog(gain, A_eq=equal[:-1], b_eq=[*chances, *p.double().tolist()][:-1])
    assert solved.success
    return -float(solved.fun)


@pytest.mark.parametrize("seed", range(6))
def test_the_output_law_is_exact_and_acceptance_near_the_optimum(seed):
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.rand(2, 3, generator=generator).square().add_(0.01)
    p, q = p / p.sum(), q / q.sum()
    before = 0.0
    for count in (1, 2, 3):
        assert output_law(p, q, count).tolist() == pytest.approx(p.tolist(), abs=1e-5)
        accepted, best = acceptance(p, q, count), optimum(p, q, count)
        assert (1 - 1 / np.e) * best <= accepted <= best + 1e-6
        assert accepted >= before - 1e-6
        before = accepted


def test_one_sequence_is_ordinary_rejection():
    for seed in range(300):
        seq, token = Sequence([0], SamplingParams(), seed), seed % 3
        chain = DraftTree.chain([token], "s", [Q])
        rows = [Readout(probs=P), Readout(probs=P)]
        plain = RejectionVerifier().judge(seq, chain, rows, "t")
        spectr = SpecTrVerifier().judge(seq, DraftTree((token,), (-1,), "s", (Q,), ((0,),)), rows, "t")
        assert [each.kind for each in spectr.tokens] == [each.kind for each in plain.tokens]
        assert [each.id for each in spectr.tokens] == [each.id for each in plain.tokens]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "top_p": 0.8}], ids=["raw", "top_p"])
def test_the_target_law_is_kept(count, sampling):
    drafter = ModelSequencesDrafter(ModelSequencesParams(sequences=count))
    assert p_value(drafter, SpecTrVerifier(), 500, **sampling) > 1e-3


@pytest.mark.exactness
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "top_p": 0.8}], ids=["raw", "top_p"])
def test_the_target_law_is_kept_over_many_runs(count, sampling):
    drafter = ModelSequencesDrafter(ModelSequencesParams(sequences=count))
    assert p_value(drafter, SpecTrVerifier(), 200_000, **sampling) > 1e-3


class ForgetsTheRatio(SpecTrVerifier):
    """Judges each sequence as if it were alone."""

    def choose(self, seed, position, draft, candidates, probs):
        for child in candidates:
            chosen, residual = super().choose(seed, position, draft, [child], probs)
            if chosen is not None:
                break
        else:
            return None, residual if candidates else probs
        return chosen, residual


class DrawsFromTheTarget(SpecTrVerifier):
    def choose(self, seed, position, draft, candidates, probs):
        return super().choose(seed, position, draft, candidates, probs)[0], probs


class DropsRepeats(ModelSequencesDrafter):
    """Keeps one of several equal sequences: those left were not drawn independently."""

    async def propose(self, model, seq, room, length):
        tree = await super().propose(model, seq, room, length)
        kept = tuple(dict.fromkeys(tree.sequences))
        return DraftTree(tree.tokens, tree.parents, tree.source, tree.proposals, kept)


@pytest.mark.parametrize(
    ("drafter", "verifier"),
    [
        (ModelSequencesDrafter, ForgetsTheRatio()),
        (ModelSequencesDrafter, DrawsFromTheTarget()),
        (DropsRepeats, SpecTrVerifier()),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_planted_faults_are_caught(drafter, verifier):
    assert p_value(drafter(ModelSequencesParams(sequences=3)), verifier, 1_000, DraftBudget(1, 3), FAR) < 1e-4


def test_a_token_drawn_from_what_is_left_keeps_the_sequences_that_hold_it():
    """All candidates refused: where the drawn token is a draft's own, the walk goes on below it."""
    q, p = torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1])
    drawn, kinds = 0, set()
    for seed in range(400):
        tree = DraftTree((1, 0), (-1, 0), "s", (q, q), ((0, 1), (0, 1)))
        seq = Sequence([0], SamplingParams(), seed)
        verdict = SpecTrVerifier().judge(seq, tree, [Readout(probs=p)] * 3, "t")
        chosen, _ = SpecTrVerifier().choose(seed, 1, tree, [0, 0], p)
        if chosen is None:
            drawn += 1
            kinds.add((verdict.path[:1], verdict.tokens[0].id, verdict.tokens[0].kind))
    assert drawn > 0
    assert kinds <= {((), 0, TokenKind.RECOVERED), ((0,), 1, TokenKind.ACCEPTED)}
    assert ((), 0, TokenKind.RECOVERED) in kinds


def test_distributions_without_mass_are_survived():
    nothing = torch.full((3,), float("nan"))
    tree = DraftTree((0, 1), (-1, -1), "s", (nothing, nothing), ((0,), (1,)))
    verdict = SpecTrVerifier().judge(Sequence([0], SamplingParams(), 0), tree, [Readout(probs=P)] * 3, "t")
    assert len(verdict.tokens) == 1
    zero = torch.zeros(3)
    tree = DraftTree((0, 1), (-1, -1), "s", (zero, zero), ((0,), (1,)))
    assert SpecTrVerifier().judge(Sequence([0], SamplingParams(), 0), tree, [Readout(probs=P)] * 3, "t").tokens


def test_candidates_must_have_been_drawn():
    assert SpecTrVerifier.accepts == (Candidates.SEQUENCES,)
    with pytest.raises(ValueError, match="drawn from"):
        SpecTrVerifier().judge(
            Sequence([0], SamplingParams(), 0), DraftTree((0,), (-1,), "s", (), ((0,),)), [Readout(probs=P)] * 2, "t"
        )
