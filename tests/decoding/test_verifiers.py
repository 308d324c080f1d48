"""Verifier mathematics by simulation: 3 tokens, first-order Markov target and draft, 4 positions, all 81 outcomes."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from decoding.model import Readout, ReadSpec
from decoding.noise import Purpose, noise_key, uniform
from decoding.readout import read
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from decoding.verifiers.base import Verifier, want_of
from decoding.verifiers.match import MatchVerifier
from decoding.verifiers.rejection import RejectionVerifier, subtract
from tests.decoding.many_runs import many_runs
from turnout.part_choice import PartChoice
from turnout.registry import names
from turnout.types import SamplingParams, TokenKind

TARGET = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.3, 0.4, 0.3]])
DRAFT = torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.3, 0.3], [0.3, 0.1, 0.6]])
POSITIONS = 4
RUNS = 6_000  # twice as many as show every planted fault
SAMPLING = SamplingParams(max_tokens=64)

DrawTree = Callable[[int, int, int], DraftTree]


def draw(probs: torch.Tensor | list[float], seed: int, position: int, lane: int) -> int:
    """Inverse-CDF draw with draft noise."""
    left = uniform(noise_key(seed, position, Purpose.DRAFT, lane))
    for token, p in enumerate(probs if isinstance(probs, list) else probs.tolist()):
        left -= p
        if left < 0:
            return token
    return int(torch.as_tensor(probs).argmax())


DRAFT_ROWS = DRAFT.tolist()


def chain(length: int) -> DrawTree:
    def tree(seed: int, position: int, last: int) -> DraftTree:
        tokens: list[int] = []
        proposals: list[torch.Tensor | None] = []
        for index in range(length):
            proposals.append(DRAFT[last])
            last = draw(DRAFT_ROWS[last], seed, position, index)
            tokens.append(last)
        return DraftTree.chain(tokens, "small", proposals)

    return tree


def bush(seed: int, position: int, last: int) -> DraftTree:
    """Three children at the root (two without replacement, one deterministic), two i.i.d. below the first."""
    one = draw(DRAFT_ROWS[last], seed, position, 0)
    without = DRAFT[last].clone()
    without[one] = 0.0
    without /= without.sum()
    two = draw(without, seed, position, 1)
    four, five = (draw(DRAFT_ROWS[one], seed, position, lane) for lane in (2, 3))
    proposals = (DRAFT[last], without, None, DRAFT[one], DRAFT[one])
    return DraftTree((one, two, 2, four, five), (-1, -1, -1, 0, 0), "small", proposals)


def play(verifier: Verifier, draw_tree: DrawTree, seed: int) -> list[int]:
    """Rounds from token 0 until four tokens stand, straight through `judge`."""
    rows = [Readout(probs=probs) for probs in TARGET]
    seq = Sequence([0], SAMPLING, seed)
    while len(seq) <= POSITIONS:
        last = seq.tokens[-1]
        tree = draw_tree(seed, len(seq), last)
        verdict = verifier.judge(seq, tree, [rows[last], *(rows[token] for token in tree.tokens)], "large")
        seq.extend(verdict.tokens, {"small": 0, "large": 0})
    return seq.tokens[1 : POSITIONS + 1]


@many_runs()
def outcomes(verifier: Verifier, draw_tree: DrawTree, runs: int) -> list[list[int]]:
    return [play(verifier, draw_tree, seed) for seed in range(runs)]


def exact(probs: torch.Tensor = TARGET) -> np.ndarray:
    """Probability of each of the 81 sequences."""
    law = np.zeros(3**POSITIONS)
    for code in range(3**POSITIONS):
        p, last = 1.0, 0
        for digit in np.base_repr(code, 3).zfill(POSITIONS):
            p *= probs[last, int(digit)].item()
            last = int(digit)
        law[code] = p
    return law / law.sum()


def p_value(sequences: list[list[int]]) -> float:
    """Of the chi-square test over all 81 sequences, 80 degrees of freedom."""
    codes = np.array(sequences) @ (3 ** np.arange(POSITIONS)[::-1])
    counts = np.bincount(codes, minlength=3**POSITIONS)
    return float(stats.chisquare(counts, exact() * len(sequences)).pvalue)


@pytest.mark.parametrize("draw_tree", [chain(3), bush], ids=["chain", "tree"])
def test_rejection_keeps_the_target_law(draw_tree: DrawTree):
    verifier = RejectionVerifier()
    assert p_value(outcomes(verifier, draw_tree, RUNS)) > 1e-3


@pytest.mark.exactness
@pytest.mark.parametrize("draw_tree", [chain(3), bush], ids=["chain", "tree"])
def test_rejection_keeps_the_target_law_over_many_runs(draw_tree: DrawTree):
    verifier = RejectionVerifier()
    assert p_value(outcomes(verifier, draw_tree, 200_000)) > 1e-3


def keyed_p_value(runs: int) -> float:
    """Of plain decoding with each run's noise by its seed."""
    logits = TARGET.log()
    seqs = [Sequence([0], SAMPLING, seed) for seed in range(runs)]
    paths: list[tuple[int, ...]] = [()] * runs
    for _ in range(POSITIONS):
        last = torch.tensor([path[-1] if path else 0 for path in paths])
        rows = read(logits[last], [RowContext(s, p) for s, p in zip(seqs, paths, strict=True)], [ReadSpec()] * runs)
        paths = [(*path, row.token) for path, row in zip(paths, rows, strict=True)]
    return p_value([list(path) for path in paths])


def test_plain_keyed_sampling_has_the_target_law():
    """With the match verifier's equality to plain decoding (test_speculative), this is its exactness too."""
    assert keyed_p_value(RUNS) > 1e-3


@pytest.mark.exactness
def test_plain_keyed_sampling_has_the_target_law_over_many_runs():
    assert keyed_p_value(200_000) > 1e-3


class ForgetsTheResidual(RejectionVerifier):
    def choose(self, seed, position, draft, children, residual):
        accepted, _ = super().choose(seed, position, draft, children, residual)
        return accepted, residual


class ReusesTheCoin(RejectionVerifier):
    """Accepts with the noise the drafts were drawn with."""

    def choose(self, seed, position, draft, children, residual):
        for rank, child in enumerate(children):
            token, proposal = draft.tokens[child], draft.proposal(child)
            assert proposal is not None
            u = uniform(noise_key(seed, position, Purpose.DRAFT, rank))
            if u * float(proposal[token]) < float(residual[token]):
                return child, residual
            residual = subtract(residual, token, proposal)
        return None, residual


class ReadsOneRowTooEarly(RejectionVerifier):
    def judge(self, seq, draft, rows, target):
        return super().judge(seq, draft, [rows[0], *rows[:-1]], target)


class AlwaysAccepts(RejectionVerifier):
    def choose(self, seed, position, draft, children, residual):
        return (children[0] if children else None), residual


def sorted_siblings(seed: int, position: int, last: int) -> DraftTree:
    """Re-ranks drawn siblings by draft probability, which destroys the draw order."""
    tokens = [draw(DRAFT_ROWS[last], seed, position, lane) for lane in (0, 1)]
    tokens.sort(key=lambda token: -DRAFT[last, token].item())
    return DraftTree(tuple(tokens), (-1, -1), "small", (DRAFT[last], DRAFT[last]))


def drops_unlikely(seed: int, position: int, last: int) -> DraftTree:
    """Breaks rule P: leaves a drawn token out because of its own probability."""
    tree = chain(1)(seed, position, last)
    return tree if DRAFT[last, tree.tokens[0]] >= 0.35 else DraftTree.chain([], "small")


def untouched_proposal(seed: int, position: int, last: int) -> DraftTree:
    """Claims a deterministic candidate was a draw."""
    return DraftTree.chain([0], "small", [DRAFT[last]])


@pytest.mark.parametrize(
    ("verifier", "draw_tree"),
    [
        (ForgetsTheResidual(), chain(3)),
        (ForgetsTheResidual(), bush),
        (ReusesTheCoin(), chain(3)),
        (ReadsOneRowTooEarly(), chain(3)),
        (AlwaysAccepts(), chain(3)),
        (RejectionVerifier(), sorted_siblings),
        (RejectionVerifier(), drops_unlikely),
        (RejectionVerifier(), untouched_proposal),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_planted_faults_are_caught(verifier: Verifier, draw_tree: DrawTree):
    assert p_value(outcomes(verifier, draw_tree, RUNS // 2)) < 1e-6


def test_acceptance_and_residual_of_the_textbook_pair():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    verifier, runs, accepted = RejectionVerifier(), 8_000, 0
    for seed in range(runs):
        token = draw(q, seed, 1, 0)
        verdict = verifier.judge(
            Sequence([0], SAMPLING, seed), DraftTree.chain([token], "s", [q]), [Readout(probs=p), Readout(probs=p)], "t"
        )
        accepted += verdict.num_accepted_tokens
        if not verdict.path:
            assert token != 0
            assert verdict.tokens[0].id == 0
    assert accepted / runs == pytest.approx(torch.minimum(p, q).sum().item(), abs=0.012)
    assert subtract(p, 1, q).tolist() == [1.0, 0.0, 0.0]


class OneCoinForAllSiblings(RejectionVerifier):
    def choose(self, seed, position, draft, children, residual):
        for child in children:
            accepted, residual = super().choose(seed, position, draft, [child], residual)
            if accepted is not None:
                return accepted, residual
        return None, residual


def test_siblings_have_coins_of_their_own():
    """Second candidate 0 has acceptance 1/8 after a rejected 2, which needs a coin above 1/5."""
    p, q = torch.tensor([0.52, 0.40, 0.08]), torch.tensor([0.5, 0.1, 0.4])
    pvalues = []
    for verifier in (RejectionVerifier(), OneCoinForAllSiblings()):
        counts = np.zeros(3)
        for seed in range(8_000):
            tokens = (draw(q, seed, 1, 0), draw(q, seed, 1, 1))
            tree = DraftTree(tokens, (-1, -1), "s", (q, q))
            seq = Sequence([0], SAMPLING, seed)
            counts[verifier.judge(seq, tree, [Readout(probs=p)] * 3, "t").tokens[0].id] += 1
        pvalues.append(stats.chisquare(counts, p.double().numpy() / p.double().sum().item() * counts.sum()).pvalue)
    assert pvalues[0] > 1e-3
    assert pvalues[1] < 1e-3


def test_tokens_per_round_at_draft_length_3():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    verifier, rounds, emitted = RejectionVerifier(), 4_000, 0
    for seed in range(rounds):
        tokens = [draw(q, seed, 1, lane) for lane in range(3)]
        tree = DraftTree.chain(tokens, "s", [q] * 3)
        emitted += len(verifier.judge(Sequence([0], SAMPLING, seed), tree, [Readout(probs=p)] * 4, "t").tokens)
    expected = (1 - 0.7**4) / (1 - 0.7)
    assert round(expected, 3) == 2.533
    assert emitted / rounds == pytest.approx(expected, abs=0.04)


def test_without_replacement_siblings_cover_the_support():
    """All tokens drawn without replacement: one of them is always accepted."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    for seed in range(500):
        left, tokens, proposals = q.clone(), [], []
        for lane in range(3):
            proposals.append(left / left.sum())
            tokens.append(draw(proposals[-1], seed, 1, lane))
            left = left.clone()
            left[tokens[-1]] = 0.0
        tree = DraftTree(tuple(tokens), (-1, -1, -1), "s", tuple(proposals))
        verdict = RejectionVerifier().judge(Sequence([0], SAMPLING, seed), tree, [Readout(probs=p)] * 4, "t")
        assert verdict.num_accepted_tokens == 1


def test_rejection_at_temperature_0_takes_the_arg_max():
    hot = [Readout(probs=probs) for probs in torch.eye(3)]
    tree = DraftTree((1, 2, 0), (-1, -1, 1), "s", (torch.eye(3)[1], None, torch.eye(3)[0]))
    verdict = RejectionVerifier().judge(Sequence([0], SAMPLING, 0), tree, [hot[2], hot[0], hot[0], hot[1]], "t")
    assert verdict.path == (1, 2)
    assert [(t.id, t.kind, t.source) for t in verdict.tokens] == [
        (2, TokenKind.ACCEPTED, "s"),
        (0, TokenKind.ACCEPTED, "s"),
        (1, TokenKind.BONUS, "t"),
    ]


def test_match_follows_the_tree_and_names_the_last_token():
    tree = DraftTree((5, 6, 7, 8), (-1, -1, 1, 1), "s")
    rows = [
        Readout(token=6, logprob=-1.0),
        Readout(token=0),
        Readout(token=9, entropy_bits=2.0),
        Readout(token=0),
        Readout(token=0),
    ]
    verdict = MatchVerifier().judge(Sequence([0], SAMPLING, 0), tree, rows, "t")
    assert verdict.path == (1,)
    assert [(t.id, t.kind, t.source) for t in verdict.tokens] == [
        (6, TokenKind.ACCEPTED, "s"),
        (9, TokenKind.RECOVERED, "t"),
    ]
    assert (verdict.tokens[0].logprob, verdict.tokens[1].entropy_bits) == (-1.0, 2.0)
    rows[2] = Readout(token=8)
    verdict = MatchVerifier().judge(Sequence([0], SAMPLING, 0), tree, rows, "t")
    assert verdict.path == (1, 3)
    assert verdict.tokens[-1].kind is TokenKind.BONUS


@pytest.mark.parametrize("name", names("decoding.verifiers"))
def test_an_empty_draft_gives_one_bonus_token(name: str):
    verdict = (
        PartChoice(name=name)
        .make("decoding.verifiers", "verifier")
        .judge(
            Sequence([0], SAMPLING, 0), DraftTree((), (), "s"), [Readout(token=1, probs=torch.tensor([0.0, 1.0]))], "t"
        )
    )
    assert verdict.path == ()
    assert [(t.id, t.kind, t.source) for t in verdict.tokens] == [(1, TokenKind.BONUS, "t")]


def test_rejection_reports_the_log_probability_of_what_it_emits():
    logits = torch.tensor([1.0, 2.0, 0.5])
    row = Readout(probs=torch.tensor([0.0, 0.0, 1.0]), logits=logits, top=((1, -0.1),))
    verdict = RejectionVerifier().judge(Sequence([0], SAMPLING, 0), DraftTree.chain([2], "s"), [row, row], "t")
    expected = 0.5 - math.log(math.exp(1.0) + math.exp(2.0) + math.exp(0.5))
    assert [t.logprob for t in verdict.tokens] == pytest.approx([expected, expected])
    assert verdict.tokens[0].top == ((1, -0.1),)


def test_what_the_target_reads():
    plain, asked = (Sequence([0], SamplingParams(logprobs=n), 0) for n in (None, 2))
    assert want_of(MatchVerifier(), plain) == MatchVerifier.want
    assert want_of(MatchVerifier(), asked) == ReadSpec(logprob=True, top=2)
    assert want_of(RejectionVerifier(), asked) == ReadSpec(draw=None, probs=True, logprob=True, top=2, logits=True)


def test_subtract_never_leaves_nothing():
    p = torch.tensor([0.2, 0.8])
    assert subtract(p, 1, p) is p
    assert subtract(p, 1, None).tolist() == [1.0, 0.0]
    assert RejectionVerifier().choose(0, 0, DraftTree((), (), "s"), [], p) == (None, p)
    assert DraftTree((), (), "s").children(ROOT) == []
