"""What single logits processors compute: against transformers' where it has them, and by hand where it has not."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    TypicalLogitsWarper,
)

from decoding.logits import choice_scores
from decoding.processors.base import keep_from
from decoding.processors.bregman_top_k import BregmanTopKParams, Problem
from decoding.processors.fsd import Fsd
from decoding.processors.momentum import Momentum
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from turnout.part_choice import PartChoice
from turnout.types import SamplingParams

VOCAB = 50
INF = float("inf")


def row(*processors: dict[str, Any], prompt: list[int] | None = None, **sampling: Any) -> RowContext:
    chosen = tuple(PartChoice.model_validate(each) for each in processors)
    params = SamplingParams(max_tokens=100, processors=chosen, **sampling)
    return RowContext(Sequence(prompt or [3, 4, 3], params, seed=0))


def logits(rows: int = 8) -> torch.Tensor:
    return torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(0)) * 3


def of_probs(*probs: float) -> torch.Tensor:
    return torch.tensor([probs]).log()


@pytest.mark.parametrize(
    ("processor", "theirs"),
    [
        ({"name": "typical_p", "p": 0.7}, TypicalLogitsWarper(0.7)),
        ({"name": "epsilon_cutoff", "epsilon": 0.02}, EpsilonLogitsWarper(0.02)),
        ({"name": "eta_cutoff", "epsilon": 0.02}, EtaLogitsWarper(0.02)),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_agrees_with_transformers(processor: dict[str, Any], theirs: Any) -> None:
    raw = logits()
    mine = choice_scores(raw, [row(processor)] * len(raw))
    expected = theirs(torch.tensor([[3, 4, 3]] * len(raw)), raw)
    assert torch.equal(mine, expected)
    assert bool((mine == -INF).any())


@pytest.mark.parametrize("n", [1, 2, 3])
def test_repeated_ngrams_are_those_of_transformers(n: int) -> None:
    text = [7, 8, 9, 7, 8, 9, 7, 8]
    raw = logits(1)
    mine = choice_scores(raw, [row({"name": "no_repeat_ngram", "n": n}, prompt=text)])
    assert torch.equal(mine, NoRepeatNGramLogitsProcessor(n)(torch.tensor([text]), raw.clone()))
    assert mine[0, 9] == -INF


def test_a_tail_is_cut_where_its_curvature_is_used_up() -> None:
    """p = .5 .3 .15 .05: second differences .05 .05, so half of the curvature is used at the first of them."""
    raw = of_probs(0.5, 0.3, 0.15, 0.05)
    for z, kept in ((0.4, 1), (0.6, 1), (1.0, 4)):
        made = choice_scores(raw, [row({"name": "tail_free", "z": z})])
        assert int(made.isfinite().sum()) == kept, z


def test_sigma_does_not_see_the_temperature() -> None:
    raw = torch.tensor([[4.0, 3.0, 0.0, -1.0, -6.0]])  # mean 0, deviation sqrt(62/5) = 3.52
    for temperature in (0.5, 2.0):
        made = choice_scores(raw, [row({"name": "top_n_sigma", "n": 1.2}, temperature=temperature)])
        assert made.isfinite().tolist() == [[True, True, True, False, False]]


def test_the_temperature_follows_the_entropy() -> None:
    raw = torch.tensor([[0.0, 0.0, 0.0, 0.0], [40.0, 0.0, 0.0, 0.0]])
    raw[0, 0] = 1e-3
    asked = row({"name": "dynamic_temperature", "low": 0.5, "high": 2.0})
    made = choice_scores(raw, [asked, asked])
    assert made[0, 0].item() == pytest.approx(1e-3 / 2.0, rel=1e-4)
    assert made[1, 0].item() == pytest.approx(40.0 / 0.5, rel=1e-4)


def test_top_choices_go_by_chance_and_the_least_of_them_stays() -> None:
    raw = of_probs(0.5, 0.25, 0.15, 0.1)
    always = choice_scores(raw, [row({"name": "xtc", "threshold": 0.15, "chance": 1.0})])
    assert always.isfinite().tolist() == [[False, False, True, True]]
    contexts = [row({"name": "xtc", "threshold": 0.15, "chance": 0.3}) for _ in range(2000)]
    for place, context in enumerate(contexts):
        context.seq.seed = place
    acted = int((choice_scores(raw.expand(2000, -1), contexts)[:, 0] == -INF).sum())
    assert abs(acted - 600) < 5 * (2000 * 0.3 * 0.7) ** 0.5
    alone = choice_scores(raw, [row({"name": "xtc", "threshold": 0.3, "chance": 1.0})])
    assert torch.equal(alone, raw)  # one top choice is no choice


def test_dry_grows_with_the_repetition_and_stops_at_breakers() -> None:
    text = [5, 6, 7, 8, 9, 5, 6, 7]  # 8 would make it four tokens, after three
    raw = torch.zeros((1, VOCAB))
    asked = {"name": "dry", "multiplier": 0.5, "base": 2.0, "allowed_length": 2}
    made = choice_scores(raw, [row(asked, prompt=text)])[0]
    assert made[8].item() == pytest.approx(-0.5 * 2.0)
    assert int((made != 0).sum()) == 1
    broken = choice_scores(raw, [row({**asked, "breaker_ids": [5]}, prompt=text)])[0]
    assert broken[8].item() == pytest.approx(-0.5)
    assert torch.equal(choice_scores(raw, [row({**asked, "breaker_ids": [6]}, prompt=text)]), raw)
    assert torch.equal(choice_scores(raw, [row({**asked, "window": 4}, prompt=text)]), raw)


def test_fsd_weighs_the_anti_model_by_hand() -> None:
    """Paper #84, text a b a b a, n = 3, beta = 0.9: w(b) = 0.514, w(a) = 0.6, as a never followed `a` or `b a`."""
    a, b = 1, 2
    context = row({"name": "fsd"}, prompt=[a, b, a, b, a], temperature=0.0)
    part = Fsd(Fsd.Params(n=3, beta=0.9))
    weights = part.anti_probabilities(context, [b, a, 7])
    # b: after `b a` once of once, 0.9 * 1/2; then after `a` twice of twice, 0.1 * 0.9 * 2/3; then 0.01 * 2/5.
    assert weights == pytest.approx([0.45 + 0.06 + 0.004, 0.6, 0.0])
    raw = torch.full((1, VOCAB), -20.0)
    raw[0, [a, b, 7]] = torch.tensor([0.50, 0.30, 0.20]).log()
    made = choice_scores(raw, [context])
    assert int(made.argmax()) == 7  # 0.4 * 0.2 is more than 0.4 * 0.5 - 0.6 * 0.6
    assert made[0, a].item() == pytest.approx(0.4 * 0.5 - 0.6 * 0.6, abs=1e-5)


def test_momentum_is_the_depth_of_the_circle() -> None:
    """Paper #172, text x y z x y: z has depth 3, x and y 1, others 0; and by a search through every suffix."""
    x, y, z = 1, 2, 3
    part = Momentum()
    assert part.depths(row(prompt=[x, y, z, x, y]), [z, x, y, 9]) == [3, 1, 1, 0]
    draw = torch.Generator().manual_seed(2)
    text = torch.randint(0, 4, (60,), generator=draw).tolist()
    for token, depth in zip(range(5), Momentum().depths(row(prompt=text), list(range(5))), strict=True):
        runs = [(*text[len(text) - size + 1 :], token) for size in range(1, 6)]
        seen = {tuple(text[at : at + size]) for size in range(1, 6) for at in range(len(text) - size + 1)}
        assert depth == max((len(run) for run in runs if run in seen), default=0)
    raw = torch.full((1, VOCAB), -20.0)
    raw[0, [z, x, 9]] = torch.tensor([0.7, 0.25, 0.05]).log()
    made = choice_scores(raw, [row({"name": "momentum"}, prompt=[x, y, z, x, y], temperature=0.0)])
    assert made[0, z].item() == pytest.approx(0.7 - 0.2 * 3, abs=1e-5)
    assert int(made.argmax()) == z  # 0.1 against 0.25 - 0.2 and 0.05


def test_entropy_is_minimised_to_the_share_asked_for() -> None:
    """Paper #24 on z = (2, 1, 0): entropy 0.8324 to 0.1665 nats at temperature 0.3052."""
    raw = torch.tensor([[2.0, 1.0, 0.0]])
    made = choice_scores(raw, [row({"name": "entropy_minimisation", "form": "temperature", "ratio": 0.2})])
    assert (raw / made)[0, 0].item() == pytest.approx(0.3052, abs=2e-4)
    entropy = torch.special.entr(made.softmax(-1)).sum()
    assert entropy.item() == pytest.approx(0.1665, abs=1e-4)


def test_gradient_steps_are_those_of_adam_and_stop_at_the_floor() -> None:
    raw = logits()
    raw[0] = 0.0
    raw[0, 0] = 30.0  # no doubt: below the floor before the first step
    made = choice_scores(raw, [row({"name": "entropy_minimisation"})] * len(raw))
    assert torch.equal(made[0], raw[0])
    for place in range(1, len(raw)):
        z = raw[place].clone().requires_grad_()
        own, optimiser = raw[place].softmax(-1), torch.optim.Adam([z], lr=0.1)
        for _ in range(5):
            probs = z.softmax(-1)
            entropy = torch.special.entr(probs).sum()
            if entropy < 0.3:
                break
            loss = entropy + 0.001 * (own * (own.log() - probs.log())).sum()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        assert torch.allclose(made[place], z.detach(), atol=2e-5)
    moved = [place for place in range(len(raw)) if not torch.equal(made[place], raw[place])]
    assert len(moved) > 2
    for place in moved:  # by no single temperature
        slope = (made[place] - made[place].max()) / (raw[place] - raw[place].max())
        assert float(slope[slope.isfinite()].std()) > 1e-3


@pytest.mark.parametrize(
    ("form", "alpha"), [*(("primal", a) for a in (1.0, 1.5, 2.0, 3.0)), *(("dual", a) for a in (1.5, 2.0, 3.0))]
)
def test_bisection_finds_the_support_that_a_scan_finds(form: str, alpha: float) -> None:
    draw = torch.Generator().manual_seed(4)
    sizes = set()
    for place in range(12):
        probs = (torch.randn(12, generator=draw, dtype=torch.float64) * 2).softmax(-1).sort(descending=True).values
        params = BregmanTopKParams(alpha=alpha, form=form, cost=0.002 + 0.004 * place)
        problem = Problem(probs.numpy(), probs, params)
        costs = [problem.cost(size) for size in range(1, 13)]
        assert problem.best_size() == min(range(12), key=costs.__getitem__) + 1
        steps = [after - before for before, after in pairwise(costs)]
        assert all(after >= before - 1e-9 for before, after in pairwise(steps))  # convex
        q = problem.solve(problem.best_size())
        assert float(q.sum()) == pytest.approx(1.0)
        assert bool((q >= probs[: len(q)].numpy() - 1e-9).all())
        sizes.add(problem.best_size())
    assert len(sizes) > 1


def test_bregman_by_hand() -> None:
    """Paper #87, p = .5 .3 .15 .05: KL at 0.2 costs .893 .623 .651 .800; alpha 2 at 0.05 keeps two, at .6 and .4."""
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    problem = Problem(probs.numpy(), probs, BregmanTopKParams(alpha=1.0, cost=0.2))
    assert [problem.cost(size) for size in (1, 2, 3, 4)] == pytest.approx([0.893, 0.623, 0.651, 0.800], abs=1e-3)
    made = choice_scores(of_probs(0.5, 0.3, 0.15, 0.05), [row({"name": "bregman_top_k", "alpha": 2.0, "cost": 0.05})])
    assert made.exp().tolist()[0] == pytest.approx([0.6, 0.4, 0.0, 0.0], abs=1e-5)
    near_one = Problem(probs.numpy(), probs, BregmanTopKParams(alpha=1.0001, cost=0.2))
    assert near_one.cost(2) == pytest.approx(problem.cost(2), abs=1e-3)


def test_listed_processors_act_in_their_order_within_a_stage() -> None:
    raw = of_probs(0.4, 0.3, 0.2, 0.1)
    flat_first = choice_scores(raw, [row({"name": "top_p", "p": 0.7}, top_k=2)])  # two are left, of them 0.57 and 0.43
    assert flat_first.isfinite().tolist() == [[True, True, False, False]]
    one = choice_scores(raw, [row({"name": "top_k", "k": 2}, {"name": "top_p", "p": 0.5})])
    other = choice_scores(raw, [row({"name": "top_p", "p": 0.5}, {"name": "top_k", "k": 2})])
    assert int(one.isfinite().sum()) == 1
    assert int(other.isfinite().sum()) == 2


def test_a_search_has_the_first_of_equal_candidates_whatever_other_rows_ask_for() -> None:
    raw = torch.zeros((2, 3000))
    for name in ("fsd", "momentum"):
        few, many = ({"name": name, "k": k} for k in (4, 100))
        made = choice_scores(raw, [row(few, temperature=0.0), row(many, temperature=0.0)])
        assert made[0].isfinite().nonzero()[:, 0].tolist() == [0, 1, 2, 3]
        assert torch.equal(choice_scores(raw[:1], [row(few, temperature=0.0)])[0], made[0])


def test_parameters_of_a_sequence_that_are_replaced_hold_from_then_on() -> None:
    raw, context = logits(1), row({"name": "top_k", "k": 3})
    assert int(choice_scores(raw, [context]).isfinite().sum()) == 3
    chain = context.seq.chain
    context.seq.sampling = context.seq.sampling.model_copy(update={"logprobs": 2})
    choice_scores(raw, [context])
    assert context.seq.chain is chain  # what it knows of the text stays
    context.seq.sampling = context.seq.sampling.model_copy(update={"processors": ()})
    assert torch.equal(choice_scores(raw, [context]), raw)


@pytest.mark.parametrize("flushed", [False, True])
def test_what_is_at_the_floor_stays_where_a_library_made_subnormal_numbers_zero(flushed: bool) -> None:
    scores = torch.tensor([[1.0, 2.0, 3.0, float("-inf")]]).repeat(1, 5)  # more than one vector of a processor
    assert torch.set_flush_denormal(flushed) or not flushed
    try:
        kept = [keep_from(scores, scores, torch.tensor([[floor]])) for floor in (2.0, 9.0, float("-inf"))]
    finally:
        torch.set_flush_denormal(False)
    assert [made.isfinite()[0, :4].tolist() for made in kept] == [
        [False, True, True, False],
        [False, False, True, False],
        [True, True, True, False],
    ]
    assert all(torch.equal(made[:, :4].repeat(1, 5), made) for made in kept)
