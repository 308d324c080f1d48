"""The law of the answers of one and two particles, enumerated: all orders of visits, all resamplings, all draws.

What is exact, whatever the number of particles: the expectation of the estimate of what fits where an answer is drawn,
which is the model's own probability of it. The law of the answer is not that of the model given what fits: its weights
are divided by their sum, so that it is off by about one part in the number of particles.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from decoding.fakes import TableModel, markov, pair
from decoding.model import MEASURES, Request
from decoding.sequence import Sequence
from tests.decoding.many_runs import many_runs
from tests.decoding.test_smc import END, START, A, B, C, Listed, X
from turnout.registry import get_method
from turnout.types import SamplingParams

Text = tuple[int, ...]
State = tuple[tuple[Text, float], ...]  # texts with their weights; those of other orders are one
FITTING = ((A, C), (B,))
RUNS = 600


@cache
def table() -> torch.Tensor:
    """After `a`, what fits is improbable. No token has 2/3 of the probability, so that one estimate is used."""
    probs = torch.zeros((7, 7))
    probs[START, A], probs[START, B], probs[START, X] = 0.6, 0.2, 0.2
    probs[A, C], probs[A, X], probs[A, B] = 0.1, 0.6, 0.3
    probs[B, END], probs[B, X], probs[B, A] = 0.5, 0.3, 0.2
    probs[C, END], probs[C, X] = 0.6, 0.4
    probs[X, END] = probs[END, END] = 1.0
    return probs


def law() -> dict[Text, float]:
    """The model's own probability of what fits."""
    return {text: float(np.prod([float(table()[a, b]) for a, b in pairwise((START, *text, END))])) for text in FITTING}


def normalised(probs: dict[Text, float]) -> dict[Text, float]:
    return {text: prob / sum(probs.values()) for text, prob in probs.items()}


@cache
def drawn(text: Text) -> dict[tuple[int, float], float]:
    """Probabilities of the next token and its weight, over all orders of visits: the recursive estimate by hand."""
    probs = {token: prob for token, prob in enumerate(table()[(START, *text)[-1]].tolist()) if prob > 0.0}
    permitted = Listed(FITTING)._next(text)
    found = defaultdict[tuple[int, float], float](float)

    def visit(left: dict[int, float], weight: float, chance: float) -> None:
        total = sum(left.values())
        for token, prob in left.items():
            share, others = prob / total, {other: p for other, p in left.items() if other != token}
            if token not in permitted:
                visit(others, weight * (1 - share), chance * share)
            elif not others:
                found[token, weight] += chance * share
            for other, p in others.items() if token in permitted else ():
                then = weight if other in permitted else weight * share
                found[token, then] += chance * share * p / sum(others.values())

    visit(probs, 1.0, 1.0)
    return dict(found)


def stepped(particle: tuple[Text, float]) -> list[tuple[tuple[Text, float], float]]:
    text, weight = particle
    if text[-1:] == (END,):
        return [(particle, 1.0)]
    return [(((*text, token), weight * w), chance) for (token, w), chance in drawn(text).items()]


def resampled(state: State, below: float) -> list[tuple[State, float, float]]:
    """States that follow with their chances and the factor of the estimate: systematic resampling of two."""
    weights = [weight for _, weight in state]
    total = sum(weights)
    effective = total**2 / sum(weight**2 for weight in weights)
    if all(text[-1] == END for text, _ in state) or len(state) == 1 or effective >= below * 2 - 1e-9:
        return [(state, 1.0, 1.0)]
    (heavy, weight), (light, _) = sorted(state, key=lambda each: -each[1])
    twice = 2 * weight / total - 1
    kept = ((heavy, 1.0), (light, 1.0))
    return [(((heavy, 1.0),) * 2, twice, total / 2), (kept, 1 - twice, total / 2)]


def enumerated(particles: int, below: float) -> tuple[dict[Text, float], dict[Text, float]]:
    """The law of the answer, and the expectation of the estimate of what fits where it is drawn."""
    now: dict[tuple[State, float], float] = {((((), 1.0),) * particles, 1.0): 1.0}
    while any(text[-1:] != (END,) for state, _ in now for text, _ in state):
        then = defaultdict[tuple[State, float], float](float)
        for (state, estimate), chance in now.items():
            ways: list[tuple[State, float]] = [((), chance)]
            for particle in state:
                ways = [((*done, one), c * p) for done, c in ways for one, p in stepped(particle)]
            for way, c in ways:
                for after, p, factor in resampled(way, below):
                    then[tuple(sorted(after)), estimate * factor] += c * p
        now = dict(then)
    answers, estimates = dict.fromkeys(FITTING, 0.0), dict.fromkeys(FITTING, 0.0)
    for (state, estimate), chance in now.items():
        total = sum(weight for _, weight in state)
        for text, weight in state:
            answers[text[:-1]] += chance * weight / total
            estimates[text[:-1]] += chance * weight / total * estimate * total / particles
    return answers, estimates


CASES = [(1, 0.5), (2, 0.0), (2, 1.0)]


@pytest.mark.parametrize(("particles", "below"), CASES)
def test_an_answer_times_the_estimate_is_exact(particles: int, below: float) -> None:
    answers, estimates = enumerated(particles, below)
    assert sum(answers.values()) == pytest.approx(1.0)
    assert estimates == pytest.approx(law(), rel=1e-5)


def test_the_law_of_the_answer_is_between_the_masks_and_the_models() -> None:
    one, two, more = (enumerated(*case)[0][B,] for case in CASES)
    assert one == pytest.approx(0.25, rel=1e-5)
    assert one < two < normalised(law())[B,]
    assert one < more < normalised(law())[B,]


@pytest.mark.parametrize(("particles", "below"), CASES)
async def test_answers_follow_the_enumerated_law(particles: int, below: float) -> None:
    with many_runs():
        found = [await answer(seed, {"particles": particles, "resample_below": below}) for seed in range(RUNS)]
    seen = Counter(tuple(each.sequence.answer[:-1]) for each in found)

    def p_value(probs: dict[Text, float]) -> float:
        return float(stats.chisquare([seen[text] for text in FITTING], [probs[text] * RUNS for text in FITTING]).pvalue)

    expected, estimates = enumerated(particles, below)
    assert p_value(expected) > 1e-3
    assert p_value(normalised(law())) < 1e-4, "the laws of few and of many particles differ"
    if particles > 1:
        assert p_value(enumerated(1, 0.5)[0]) < 1e-4, "and from a mask"
    fits = np.exp([each.extra[MEASURES]["smc_log_fits"] for each in found])
    for text, value in estimates.items():
        values = fits * np.array([tuple(each.sequence.answer[:-1]) == text for each in found])
        assert abs(values.mean() - value) < 5 * values.std() / RUNS**0.5
    assert any(each.extra[MEASURES]["smc_resampled"] for each in found) == (below == 1.0)


async def answer(seed: int, params: dict[str, Any]) -> Request:
    model, info = TableModel("large", markov(table()), 7, num_parameters=10), get_method("smc")
    seq = Sequence([START], SamplingParams(max_tokens=8, temperature=1.0), seed, (END,))
    seq.constraint = Listed(FITTING)
    request = Request("r", seq)
    async for _ in info.run(request, pair(model, model), info.parse(params)):
        pass
    model.release(seq)
    return request
