"""Global normalisation (paper #60): weights by hand, the law by enumeration, and what truncations distort."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from decoding.fakes import TableModel, markov, pair
from decoding.logits import choice_scores
from decoding.methods.global_sampling import Distortion, Measured, effective, resampled
from decoding.model import Request, StopCondition
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from turnout.registry import get_method
from turnout.types import SamplingParams

TABLE = torch.tensor([[0.5, 0.48, 0.02], [0.36, 0.33, 0.31], [0.9, 0.06, 0.04]])
CUT: dict[str, Any] = {"temperature": 0.7, "top_k": 2, "max_tokens": 2}


def model() -> TableModel:
    return TableModel("large", markov(TABLE), 3)


async def answered(seed: int, k: int, **sampling: Any) -> tuple[Sequence, list[str]]:
    seq, large = Sequence([0], SamplingParams(**sampling), seed), model()
    request, info = Request("r", seq), get_method("global_sampling")
    async for _ in info.run(request, pair(large, large), info.parse({"k": k})):
        pass
    assert all(each is seq for each in large.cached)
    return seq, request.notes


def laws() -> tuple[dict[tuple[int, ...], float], dict[tuple[int, ...], float], dict[tuple[int, ...], float]]:
    """By answer of two tokens: local law, global law, and the product of its normalisers."""
    local, whole, weights = {}, {}, {}
    for answer in itertools.product(range(3), repeat=2):
        law, product, weight = 1.0, 1.0, 1.0
        for before, token in zip((0, answer[0]), answer, strict=True):
            powers = TABLE[before].double() ** (1 / 0.7)
            kept = powers * (TABLE[before] >= TABLE[before].sort(descending=True).values[1])
            law, product = law * float(kept[token] / kept.sum()), product * float(kept[token])
            weight *= float(kept.sum())
        local[answer], whole[answer], weights[answer] = law, product, weight
    total = math.fsum(whole.values())
    return local, {answer: each / total for answer, each in whole.items()}, weights


async def test_weights_are_the_normalisers_and_make_the_local_law_the_global_one() -> None:
    local, whole, weights = laws()
    large = model()
    seen = {}
    for seed in range(60):
        seq = Sequence([0], SamplingParams(**CUT), seed)
        await large.decode(seq, StopCondition((Measured(),)))
        seen[tuple(seq.answer)] = Distortion.of(seq.generated, 0.7).log_weight
    assert set(seen) == {answer for answer, law in local.items() if law > 0}
    for answer, weight in seen.items():
        assert weight == pytest.approx(math.log(weights[answer]), abs=1e-4)
    total = math.fsum(local[answer] * math.exp(weight) for answer, weight in seen.items())
    for answer, weight in seen.items():
        assert local[answer] * math.exp(weight) / total == pytest.approx(whole[answer], abs=1e-4)
    assert max(abs(local[answer] - whole[answer]) for answer in local) > 0.05


async def test_answers_follow_the_global_law() -> None:
    local, whole, _ = laws()
    counts: dict[tuple[int, ...], float] = dict.fromkeys(local, 0.0)
    for seed in range(250):
        seq, _ = await answered(seed, 8, **CUT)
        counts[tuple(seq.answer)] += 1 / 250
    to_whole, to_local = (sum((counts[answer] - law[answer]) ** 2 for answer in law) for law in (whole, local))
    assert to_whole < to_local


async def test_nothing_is_distorted_without_truncation_and_one_answer_is_plain_decoding() -> None:
    seq, notes = await answered(3, 4, temperature=1.0, max_tokens=6)
    assert notes == ["log Z by token: mean -0.0000, variance 0.0000; effective answers: 4.00 of 4"] or notes == [
        "log Z by token: mean 0.0000, variance 0.0000; effective answers: 4.00 of 4"
    ]
    assert len(seq.answer) == 6
    plain = Sequence([0], SamplingParams(**{**CUT, "max_tokens": 12}), 5)
    await model().decode(plain)
    measured, notes = await answered(5, 1, **{**CUT, "max_tokens": 12})
    assert measured.tokens == plain.tokens
    assert "effective answers: 1.00 of 1" in notes[0]
    greedy, notes = await answered(5, 4, temperature=0.0, max_tokens=3)
    assert (len(greedy.answer), notes) == (3, ["one answer instead of 4: at temperature 0 they would all be the same"])


def test_one_is_resampled_by_weight() -> None:
    weights = [math.log(0.2), math.log(0.5), math.log(0.3)]
    assert [resampled(weights, at) for at in (0.0, 0.19, 0.21, 0.69, 0.71, 0.9999999)] == [0, 0, 1, 1, 2, 2]
    assert resampled([-4000.0, -1e5], 0.999) == 0
    assert effective(weights) == pytest.approx(1 / (0.04 + 0.25 + 0.09))


def test_top_k_distorts_more_unevenly_than_top_p_of_as_much_mass() -> None:
    raw = torch.randn((400, 60), generator=torch.Generator().manual_seed(0)) * torch.linspace(0.3, 4.0, 400)[:, None]
    probs = raw.softmax(-1)

    def log_z(**sampling: Any) -> torch.Tensor:
        row = RowContext(Sequence([0], SamplingParams(max_tokens=2, **sampling), 0))
        return (probs * choice_scores(raw, [row] * 400).isfinite()).sum(-1).log()

    fixed = log_z(top_k=12)
    nucleus = log_z(top_p=float(fixed.exp().mean()) - 0.02)
    assert float(nucleus.exp().mean()) == pytest.approx(float(fixed.exp().mean()), abs=0.03)
    assert float(fixed.var()) > 2 * float(nucleus.var())
