"""Typical acceptance: its bound by hand, which path stays, and the greedy limit."""

import math

import pytest
import torch

from decoding.drafters.base import Candidates
from decoding.model import Readout
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.typical import TypicalParams, TypicalVerifier
from turnout.errors import TurnoutError
from turnout.registry import get_method
from turnout.types import SamplingParams, Token, TokenKind

P = torch.tensor([0.5, 0.25, 0.25, 0.0])


def begun(**sampling: float) -> Sequence:
    """An answer with a token already, so that nothing must be the arg-max."""
    seq = Sequence([0], SamplingParams(**sampling), 0)
    seq.append(Token(0, "t"))
    return seq


def test_the_bound_of_the_card():
    assert math.exp(-float(torch.special.entr(P).sum())) == pytest.approx(0.3536, abs=1e-4)
    assert TypicalVerifier().bound(P) == pytest.approx(0.09)
    loose = TypicalVerifier(TypicalParams(epsilon=0.5, delta=0.3))
    assert loose.bound(P) == pytest.approx(0.3 * 0.3536, abs=1e-4)
    flat = torch.full((1000,), 1e-3)
    assert TypicalVerifier().bound(flat) == pytest.approx(0.3e-3, rel=1e-3)


@pytest.mark.parametrize(("chance", "accepted"), [(0.0901, True), (0.0899, False)])
def test_a_candidate_must_exceed_the_bound(chance, accepted):
    p = torch.tensor([0.5, 0.5 - chance, chance])
    verdict = TypicalVerifier().judge(begun(), DraftTree((2,), (-1,), "s"), [Readout(probs=p), Readout(probs=p)], "t")
    assert verdict.path == ((0,) if accepted else ())
    assert [(token.id, token.kind, token.source) for token in verdict.tokens] == (
        [(2, TokenKind.ACCEPTED, "s"), (0, TokenKind.BONUS, "t")] if accepted else [(0, TokenKind.RECOVERED, "t")]
    )


def test_the_longest_path_stays_and_of_several_the_likeliest():
    #  1(0)   2(1)   0(2)
    #   |      |      |
    #  3(3)   1(4)   1(5)    token 3 is impossible
    tree = DraftTree((1, 2, 0, 3, 1, 1), (-1, -1, -1, 0, 1, 2), "s")
    rows = [Readout(probs=P)] * 7
    verdict = TypicalVerifier().judge(begun(), tree, rows, "t")
    assert verdict.path == (2, 5)
    sharp = torch.tensor([0.05, 0.9, 0.05, 0.0])
    rows = [Readout(probs=P), Readout(probs=P), Readout(probs=sharp), Readout(probs=P), *[Readout(probs=P)] * 3]
    assert TypicalVerifier().judge(begun(), tree, rows, "t").path == (1, 4)


def test_below_a_refused_node_nothing_counts():
    tree = DraftTree((3, 0, 0, 1), (-1, 0, 1, -1), "s")
    assert TypicalVerifier().judge(begun(), tree, [Readout(probs=P)] * 5, "t").path == (3,)


def test_an_answer_begins_with_the_arg_max():
    seq, rows = Sequence([0], SamplingParams(), 0), [Readout(probs=P)] * 3
    tree = DraftTree((1, 1), (-1, 0), "s")
    assert TypicalVerifier().judge(begun(), tree, rows, "t").path == (0, 1)
    verdict = TypicalVerifier().judge(seq, tree, rows, "t")
    assert [token.id for token in verdict.tokens] == [0]


async def test_greedy_output_is_plain_greedy(run, make_model):
    small, large = make_model("small", 1), make_model("large", 2)
    accepted = 0
    for index in range(20):
        plain = await run("plain", small, large, prompt=(index % 12, 2), temperature=0)
        params = {"drafter": "model_tree", "verifier": "typical"}
        done = await run("speculative", small, large, params, prompt=(index % 12, 2), temperature=0)
        assert done.ids == plain.ids
        accepted += done.seq.meter.speculation.accepted_tokens
    assert accepted > 0


async def test_more_is_accepted_than_losslessly(run, make_model):
    small, large = make_model("small", 1), make_model("large", 2, scale=1.0)
    rounds = {}
    for verifier in ("typical", "match"):
        params = {"drafter": "model_tree", "verifier": verifier}
        done = [await run("speculative", small, large, params, seed=seed) for seed in range(12)]
        rounds[verifier] = sum(each.seq.meter.speculation.rounds for each in done)
    assert rounds["typical"] < rounds["match"]


def test_it_says_that_it_is_lossy_and_takes_no_drawn_candidates():
    method = get_method("speculative")
    assert not TypicalVerifier.lossless
    assert TypicalVerifier.accepts == (Candidates.FIXED,)
    assert not method.parse({"verifier": "typical", "drafter": "model_tree"}).lossless
    with pytest.raises(TurnoutError, match="'typical' judges fixed drafts"):
        method.parse({"verifier": "typical", "drafter": "rsd_s"})
