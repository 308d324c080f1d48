"""Seed 46's draws, judged: what each more sibling is worth, first children, and larger budgets at every temperature."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from decoding.draft_trees import draw_without_replacement, sibling_proposals, tree_noise
from decoding.drafters.base import Candidates, DraftBudget
from decoding.drafters.sequoia import SequoiaDrafter
from decoding.fakes import TableModel
from decoding.lengths.fixed import FixedLength
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from decoding.tree_plans import PlanTable
from decoding.verifiers.rejection import RejectionVerifier
from turnout.types import SamplingParams

P, Q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
Draws = tuple[list[int], list[torch.Tensor]]


def without_replacement(seed: int) -> Draws:
    [draws] = draw_without_replacement([Q], 3, seed, 1, [0])
    tokens = [token for token, _ in draws]
    return tokens, sibling_proposals(Q, tokens)


def with_replacement(seed: int) -> Draws:
    return (Q.log() + tree_noise(seed, 1, [0, 1, 2], Q)).argmax(-1).tolist(), [Q] * 3


@pytest.mark.parametrize(
    ("draw", "expected"),
    [(without_replacement, [0.70, 0.82, 1.0]), (with_replacement, [0.70, 0.76, 0.808])],
    ids=["without", "with"],
)
def test_acceptance_by_number_of_draws(draw: Callable[[int], Draws], expected: list[float]) -> None:
    """The card's pair, drawn and judged by the parts themselves."""
    runs, taken = 3_000, [0, 0, 0]
    for seed in range(runs):
        tokens, proposals = draw(seed)
        siblings = DraftTree(tuple(tokens), (ROOT,) * 3, "small", tuple(proposals))
        accepted, _ = RejectionVerifier().choose(seed, 1, siblings, [0, 1, 2], P)
        if accepted is not None:
            taken[accepted] += 1
    shares = [sum(taken[: rank + 1]) / runs for rank in range(3)]
    assert shares == pytest.approx(expected, abs=0.03)  # more than three standard errors
    assert (sum(taken) == runs) == (draw is without_replacement)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}], ids=str)
async def test_a_draft_that_is_the_target_has_its_first_children_accepted(
    make_model: Any, sampling: dict[str, float]
) -> None:
    small, large, wide = make_model("small", 5), make_model("large", 5), 0
    for seed in range(30):
        seq = Sequence([seed % 12, 2], SamplingParams(**sampling), seed)
        tree = await SequoiaDrafter(candidates=Candidates.DRAWN).propose(small, seq, DraftBudget(4, 24), FixedLength())
        verdict = await large.verify(seq, tree, RejectionVerifier())
        firsts, below = [], tree.children(ROOT)
        wide += len(below) > 1
        while below:
            firsts.append(below[0])
            below = tree.children(below[0])
        assert verdict.path == tuple(firsts)
    assert wide == 30


RATES = (0.6, 0.2, 0.1)


def best_of_chains(nodes: int) -> float:
    """Expected tokens of the best chains apart, all of one length, that so many nodes make: they part at the root."""
    lengths = range(1, nodes + 1)
    return max(
        1.0 + sum(RATES[: nodes // length]) * sum(RATES[0] ** place for place in range(length)) for length in lengths
    )


def test_the_best_tree_grows_with_its_budget_where_chains_apart_flatten() -> None:
    budgets = (8, 32, 128, 512)
    table = PlanTable(RATES, 512, 24)
    trees, chains = [float(table.lengths[24, each]) for each in budgets], [best_of_chains(each) for each in budgets]
    assert chains[-1] < 1.0 + sum(RATES) / (1.0 - RATES[0]) + 1e-9
    assert chains[-1] - chains[1] < 0.1
    gains = [later - earlier for earlier, later in pairwise(trees)]
    assert min(gains) > 0.5
    assert trees[-1] > 1.5 * chains[-1]


VOCAB = 24
ANSWERS, LENGTH = 5, 40


async def tokens_per_round(run: Any, make_model: Any, temperature: float, **params: Any) -> float:
    """Over some answers of one length, the draft being somewhat off."""
    large, twist = make_model("large", 2, VOCAB), make_model("twist", 1, VOCAB)
    small = TableModel("small", lambda t: large.next_logits(t) + 0.6 * twist.next_logits(t), VOCAB)
    params = {"verifier": "rejection", "draft_length": 8, **params}
    rounds = 0
    for seed in range(ANSWERS):
        sampling = {"seed": seed, "temperature": temperature, "max_tokens": LENGTH}
        done = await run("speculative", small, large, params, prompt=(seed, 2), **sampling)
        rounds += done.seq.meter.speculation.rounds
    return ANSWERS * LENGTH / rounds


async def test_larger_trees_are_worth_more_at_every_temperature(run: Any, make_model: Any) -> None:
    over_chain = []
    for temperature in (0.0, 0.6, 1.0):
        chain = await tokens_per_round(run, make_model, temperature, drafter="model_chain", draft_length=4)
        few, many = [
            await tokens_per_round(run, make_model, temperature, drafter="sequoia", nodes=nodes) for nodes in (4, 20)
        ]
        assert many > 1.1 * few
        over_chain.append(many / chain)
    assert min(over_chain) > 1.2
    assert max(over_chain) < 1.25 * min(over_chain)
