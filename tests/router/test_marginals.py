"""Samples given out by what a probe predicts each of them to add: rewards that are more than right and wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from decoding.model import ModelPool
from router.allocation import reward_marginals
from router.base import RoutingPolicy
from tests.router.probes import asked, models_of, policy, save_marginals, save_router
from training.router_outcomes import Outcome, Outcomes, Sample
from training.router_targets import WhatSamplesAdd
from training.router_training import Recipe, read_prompts, train_probe
from turnout.errors import Code, TurnoutError

MOST = 4
# How far the rewards of a prompt's samples are apart, by its last token: where they are alike, another brings nothing.
SPREAD = [0.0] * 6 + [2.0, 4.0, 6.0, 8.0]


def added_by(spread: float, mean: float = 0.0) -> list[float]:
    return reward_marginals([mean + spread * place for place in (-1.0, -0.5, 0.0, 0.5, 1.0)], MOST)


async def counts_of(router: RoutingPolicy, models: ModelPool, lasts: list[int]) -> list[int]:
    return [(await router.decide(asked(last), models)).params["k"] for last in lasts]


@pytest.mark.parametrize("mean", [-5.0, 0.1, 5.0])
async def test_samples_go_where_they_add_most_to_the_reward_within_the_budget(tmp_path: Path, mean: float):
    """Whatever the rewards' mean is: the first sample is everybody's, and bounds what the others bring by nothing."""
    save_marginals(tmp_path, [added_by(spread, mean) for spread in SPREAD])
    models = models_of(tmp_path)
    router = policy("adaptive_best_of", artifact="marginals", by="marginals", average=2, most=MOST, window=20)
    router.check(models)
    lasts = np.random.default_rng(0).integers(0, 10, 200).tolist()
    given = await counts_of(router, models, lasts)
    assert max(sum(given[start : start + 20]) for start in range(181)) <= 40
    gained = sum(sum(added_by(SPREAD[last])[1:count]) for last, count in zip(lasts, given, strict=True))
    uniform = sum(added_by(SPREAD[last])[1] for last in lasts)
    assert gained > 1.1 * uniform
    assert all(count == 1 for last, count in zip(lasts, given, strict=True) if last == 0)


async def test_a_decision_says_what_was_predicted(tmp_path: Path):
    save_marginals(tmp_path, [added_by(spread) for spread in SPREAD])
    router = policy("adaptive_best_of", artifact="marginals", by="marginals", average=3, most=3, rerank="logprob")
    decision = await router.decide(asked(9, temperature=0.0), models_of(tmp_path))
    assert decision.params == {"model": "small", "k": 3, "rerank": "logprob"}
    assert decision.sampling == {"greedy_temperature": 0.8}
    assert [decision.scores[f"delta_{place}"] for place in (1, 2, 3, 4)] == pytest.approx(added_by(8.0), abs=1e-4)
    assert (
        decision.reason
        == f"3 samples where further ones are predicted to add {sum(added_by(8.0)[1:3]):.3g} to the reward"
    )


async def test_what_is_trained_is_what_is_served(tmp_path: Path):
    models, rng = models_of(tmp_path), np.random.default_rng(0)
    lasts = rng.integers(0, 10, 400).tolist()
    rows = [
        Outcome(
            prompt=f"q{number}",
            correct_small=True,
            samples_large=tuple(Sample(reward=float(each)) for each in SPREAD[last] * rng.normal(size=8)),
        )
        for number, last in enumerate(lasts)
    ]
    inputs = await read_prompts(models, [[0, 1, 2, last] for last in lasts], lambda *_: None)
    recipe = Recipe(32, epochs=40, learning_rate=1e-2)
    run = train_probe(models, Outcomes.of(rows), inputs, WhatSamplesAdd(MOST, "large"), recipe)
    run.artifact.save(tmp_path / "marginals.safetensors")
    router = policy("adaptive_best_of", artifact="marginals", by="marginals", model="large", average=2, most=MOST)
    router.check(models)
    given = await counts_of(router, models, lasts[:200])
    steady, scattered = ([k for last, k in zip(lasts, given, strict=False) if low <= last < low + 3] for low in (0, 7))
    assert np.mean(scattered) > np.mean(steady) + 1.0


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"model": "large"}, "routing.policy.params.model: is large; the artifact is about samples of small"),
        ({"most": 5}, "routing.policy.params.most: is 5; the artifact predicts 4 samples"),
        ({"artifact": "router"}, "is of the kind 'router_probe'; 'marginals_probe' is needed"),
        ({"by": "bins"}, "is of the kind 'marginals_probe'; 'router_probe' is needed"),
    ],
)
def test_what_the_artifact_cannot_tell_is_refused_at_the_start(tmp_path: Path, params: dict, said: str):
    save_marginals(tmp_path, [added_by(spread) for spread in SPREAD])
    save_router(tmp_path, [[0.5, 0.9]] * 10)
    router = policy("adaptive_best_of", **{"artifact": "marginals", "by": "marginals", "most": MOST, **params})
    with pytest.raises(TurnoutError) as refused:
        router.check(models_of(tmp_path))
    assert said in str(refused.value)
    assert refused.value.code is Code.INVALID_ARGUMENT
