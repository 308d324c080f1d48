"""Probes from outcomes: what is read, what is refused, what is learnt, and what the report says of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from decoding.artifacts import Artifacts
from decoding.fakes import TableModel, pair
from decoding.model import ModelPool, Readout, ReadSpec
from decoding.sequence import Sequence
from router.base import make_policy
from router.difficulty.features import features_of, state_of
from router.difficulty.probe import MARGINALS_PROBE, ROUTER_PROBE, STRATEGY_PROBE, Probe
from tests.router.probes import asked
from training.router_outcomes import Outcome, Outcomes, Sample
from training.router_targets import WhatSamplesAdd, WhichStrategy, WhoIsRight, labels_of
from training.router_training import Recipe, Trained, read_prompts, split, train_probe
from turnout.errors import TurnoutError
from turnout.part_choice import PartChoice

VOCAB = 64


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class HashedState(TableModel):
    """Its state after a prompt is a fixed random vector of the last token."""

    def __init__(self, name: str, num_parameters: int) -> None:
        self.states = torch.randn(VOCAB, 16, generator=torch.Generator().manual_seed(0))
        super().__init__(name, lambda tokens: torch.zeros(VOCAB), VOCAB, num_parameters)

    def _read(self, seq: Sequence, paths: list[tuple[int, ...]], want: ReadSpec) -> list[Readout]:
        rows = super()._read(seq, paths, want)
        for row, path in zip(rows, paths, strict=True):
            if want.hidden:
                row.hidden[-1] = self.states[(seq.tokens + list(path))[-1]]
        return rows


def models() -> ModelPool:
    return pair(HashedState("small", 10), HashedState("large", 100))


def direction(models: ModelPool) -> torch.Tensor:
    """[VOCAB] planted difficulty: a direction of the hidden state."""
    states: torch.Tensor = models.small.states
    return states[:, 0] * 2.0


def planted(num: int, samples: int = 1, seed: int = 0) -> tuple[Outcomes, list[list[int]]]:
    """Prompts whose difficulty is in the state: the small model is right where it is low, the large one mostly."""
    hard = direction(models())
    rng = np.random.default_rng(seed)
    rows, prompts = [], []
    for number in range(num):
        token = int(rng.integers(0, VOCAB))
        chances = {"small": float(torch.sigmoid(-2 * hard[token])), "large": float(torch.sigmoid(3 - hard[token]))}
        drawn = {
            f"samples_{role}": tuple(
                Sample(reward=float(rng.random() < chance), tokens=10, entropy_bits=0.2, logprob=-0.1)
                for _ in range(samples)
            )
            for role, chance in chances.items()
        }
        rows.append(Outcome(prompt=f"question {number}", kind="odd" if number % 2 else "even", **drawn))
        prompts.append([number % VOCAB, 3, token])
    return Outcomes.of(rows), prompts


async def trained(outcomes: Outcomes, prompts: list[list[int]], target, **recipe) -> tuple[Trained, ModelPool]:
    pool = models()
    inputs = await read_prompts(pool, prompts, lambda *_: None)
    return train_probe(
        pool, outcomes, inputs, target, Recipe(**{"hidden": 32, "epochs": 40, "learning_rate": 5e-3, **recipe})
    ), pool


# Targets


def test_labels_by_hand():
    drawn = tuple(Sample(reward=value, entropy_bits=0.1) for value in (1, 0, 0, 0))
    row = Outcome(prompt="p", samples_small=drawn, correct_large=True)
    assert WhoIsRight().label(row) == [0.25, 1.0]
    assert WhichStrategy().label(row) == [0.0, 0.0, 1.0]
    assert WhatSamplesAdd(4, "small").label(row) == pytest.approx([0.25] * 4)


@pytest.mark.parametrize(
    ("target", "rows", "said"),
    [
        (WhoIsRight(), [(True, True), (True, True)], r"labels are all alike: in each of the 2 rows .* better by 0"),
        (WhoIsRight(), [(False, True), (False, True)], r"labels are all alike: in each of the 2 rows .* better by 1"),
        (WhoIsRight(), [([2.0], True), (False, True)], "mean reward of samples_small is 2 for prompt 'p0'"),
        (WhichStrategy(), [(True, True), (False, True)], "samples_small of prompt 'p0' lack entropy_bits"),
        (WhatSamplesAdd(2, "small"), [([1.0], True)], "prompt 'p0' has 1 samples_small; 2 are needed"),
        (WhatSamplesAdd(1, "small"), [([1.0], True), ([1.0], False)], "labels are all alike"),
    ],
)
def test_outcomes_that_teach_nothing_are_refused(target, rows, said: str):
    made = []
    for number, found in enumerate(rows):
        values = {}
        for role, value in zip(("small", "large"), found, strict=True):
            if isinstance(value, list):
                values[f"samples_{role}"] = tuple(Sample(reward=each) for each in value)
            else:
                values[f"correct_{role}"] = value
        made.append(Outcome(prompt=f"p{number}", **values))
    with pytest.raises(TurnoutError, match=said):
        labels_of(target, Outcomes.of(made))


def test_questions_that_all_call_for_one_strategy_are_refused():
    sample = (Sample(reward=1, entropy_bits=0.0),)
    rows = [Outcome(prompt=f"p{n}", samples_small=sample, correct_large=True) for n in range(3)]
    with pytest.raises(TurnoutError, match="all 3 rows call for 'normal'; nothing to choose"):
        labels_of(WhichStrategy(), Outcomes.of(rows))


def test_too_few_prompts_are_refused_and_parts_do_not_share_any():
    with pytest.raises(TurnoutError, match="has 19 prompts; at least 20 are needed"):
        split(planted(19)[0], 0)
    parts = split(planted(50)[0], 0)
    assert [len(part) for part in parts] == [30, 10, 10]
    assert sorted(place for part in parts for place in part) == list(range(50))
    assert split(planted(50)[0], 1) != parts


# Whole runs


@pytest.mark.parametrize("calibration", ["temperature", "isotonic"])
async def test_a_planted_difficulty_is_found(tmp_path: Path, calibration: str):
    outcomes, prompts = planted(1000)
    run, pool = await trained(outcomes, prompts, WhoIsRight(), calibration=calibration)
    small = run.report["predictions"]["p_small"]
    assert small["auc"]["low"] > 0.8
    assert small["loss"] < small["constant_loss"]
    assert small["expected_calibration_error"]["value"] < 0.1
    found = run.report["routing"]["recovered"]["all"]
    # Outcomes are draws: who knew the chances could not foresee them, and would recover about as much.
    assert 0.3 < found["low"] < found["value"] < found["high"] < 0.9
    assert run.artifact.settings["predictions"] == run.report["predictions"]
    kinds = run.report["kinds"]
    assert kinds["odd"]["num_prompts"] + kinds["even"]["num_prompts"] == 200
    assert kinds["odd"]["gain"] == pytest.approx(kinds["odd"]["large"] - kinds["odd"]["small"])
    assert kinds["odd"]["predicted_gain"] == pytest.approx(kinds["odd"]["gain"], abs=0.15)
    assert run.artifact.settings["data"] == outcomes.digest
    assert run.artifact.models == {"small": "table small", "large": "table large"}
    # Served from disk, it says the same: the planted order of two prompts.
    run.artifact.save(tmp_path / "router.safetensors")
    probe = Probe.load(Artifacts(tmp_path).open("router", ROUTER_PROBE, pool, "artifact"))
    hard = direction(pool)
    easy_row, hard_row = [asked(int(token)) for token in (hard.argmin(), hard.argmax())]
    scores = [
        probe.predict(state_of(row := await each.read(pool)), features_of(row, 4)) for each in (easy_row, hard_row)
    ]
    assert scores[0]["p_small"] > 0.9 > 0.1 > scores[1]["p_small"]


async def test_a_trained_router_routes_its_share(tmp_path: Path):
    outcomes, prompts = planted(600)
    run, pool = await trained(outcomes, prompts, WhoIsRight())
    run.artifact.save(tmp_path / "router.safetensors")
    pool = replace(pool, artifacts=Artifacts(tmp_path))
    policy = make_policy(PartChoice.of("learned", large_share=0.4), "routing.policy")
    policy.check(pool)
    rng = np.random.default_rng(9)
    sides = [(await policy.decide(asked(int(token)), pool)).params["model"] for token in rng.integers(0, VOCAB, 300)]
    assert sides.count("large") / 300 == pytest.approx(0.4, abs=0.12)


def priced(num: int) -> tuple[Outcomes, list[list[int]]]:
    """Prompts of which half take ten times as many tokens, and gain as much; which ones is in the state."""
    states = models().small.states
    rng = np.random.default_rng(3)
    rows, prompts = [], []
    for number in range(num):
        token = int(rng.integers(0, VOCAB))
        tokens = 100 if states[token, 1] > 0 else 10
        drawn = {
            f"samples_{role}": (Sample(reward=float(rng.random() < chance), tokens=tokens),)
            for role, chance in (("small", 0.3), ("large", 0.9))
        }
        rows.append(Outcome(prompt=f"question {number}", **drawn))
        prompts.append([number % VOCAB, 3, token])
    return Outcomes.of(rows), prompts


async def test_of_equal_gains_the_cheaper_ones_go_first(tmp_path: Path):
    outcomes, prompts = priced(600)
    run, pool = await trained(outcomes, prompts, WhoIsRight())
    costs = run.report["predictions"]["extra_cost"]
    assert costs["absolute_error"] < 0.2 * costs["constant_absolute_error"]
    # By the gain alone nothing would be recovered, for all prompts gain the same.
    assert run.report["routing"]["recovered"]["0.1-0.5"]["low"] > 0.2
    run.artifact.save(tmp_path / "router.safetensors")
    pool = replace(pool, artifacts=Artifacts(tmp_path))
    policy = make_policy(PartChoice.of("learned", large_share=0.4), "routing.policy")
    cheap = pool.small.states[:, 1] <= 0
    made = {token: await policy.decide(asked(token), pool) for token in range(VOCAB)}
    large = [token for token, each in made.items() if each.params["model"] == "large"]
    assert len(large) > VOCAB / 4
    assert np.mean([bool(cheap[token]) for token in large]) > 0.9
    for each in made.values():
        assert each.scores["worth"] == pytest.approx(each.scores["gain"] / each.scores["extra_cost"])
    extra = np.array([made[token].scores["extra_cost"] for token in range(VOCAB)])
    assert (extra[cheap.numpy()].mean(), extra[~cheap.numpy()].mean()) == pytest.approx((0.18, 1.8), rel=0.25)
    assert "of the mean extra cost" in made[0].reason


async def test_without_the_tokens_of_answers_all_cost_the_same(tmp_path: Path):
    outcomes, prompts = planted(100)
    rows = [
        row.model_copy(update={"samples_small": (row.samples_small[0].model_copy(update={"tokens": None}),)})
        for row in outcomes.rows
    ]
    run, _ = await trained(Outcomes.of(rows), prompts, WhoIsRight(), epochs=5)
    assert not any("extra_cost" in name for name in run.artifact.tensors)
    quantiles = run.artifact.settings["quantiles"]
    assert quantiles["worth"] == quantiles["gain"]


@pytest.mark.parametrize(("count", "few"), [(100, True), (200, False)])
async def test_few_prompts_are_doubted_aloud(count: int, few: bool):
    outcomes, prompts = planted(count)
    run, _ = await trained(outcomes, prompts, WhoIsRight(), epochs=1)
    assert ("100 prompts are few" in run.report.get("warning", "")) is few


async def test_training_again_gives_the_same_artifact(tmp_path: Path):
    outcomes, prompts = planted(100)
    files = []
    for name in ("a", "b"):
        run, _ = await trained(outcomes, prompts, WhoIsRight(), epochs=5)
        run.artifact.save(tmp_path / name)
        files.append((tmp_path / name).read_bytes())
    assert files[0] == files[1]
    other, _ = await trained(outcomes, prompts, WhoIsRight(), epochs=5, seed=1)
    assert other.artifact.version != run.artifact.version


async def test_strategies_beat_the_commonest_one_on_planted_difficulty():
    hard = direction(models())
    rng = np.random.default_rng(0)
    rows, prompts = [], []
    for number in range(800):
        token = int(rng.integers(0, VOCAB))
        level = float(hard[token]) + rng.normal(0, 0.3)
        accuracy, entropy = (1.0, 0.1) if -0.8 < level < 0.8 else (1.0, 1.5) if level <= -0.8 else (0.2, 2.0)
        drawn = tuple(Sample(reward=float(i < 10 * accuracy), entropy_bits=entropy) for i in range(10))
        rows.append(Outcome(prompt=f"q{number}", samples_small=drawn, correct_large=True))
        prompts.append([1, token])
    run, _ = await trained(Outcomes.of(rows), prompts, WhichStrategy(), epochs=60)
    assert run.artifact.kind == STRATEGY_PROBE
    assert run.report["accuracy"] > run.report["majority_accuracy"] + 0.2
    assert run.artifact.settings["role"] == "small"
    assert "warning" not in run.report  # each prompt has ten answers


async def test_marginals_of_real_rewards_are_predicted_better_than_by_a_constant():
    hard = direction(models())
    rng = np.random.default_rng(0)
    rows, prompts = [], []
    for number in range(600):
        token = int(rng.integers(0, VOCAB))
        spread = float(torch.sigmoid(hard[token])) * 3
        drawn = tuple(Sample(reward=float(each)) for each in 5 + spread * rng.normal(size=8))
        rows.append(Outcome(prompt=f"q{number}", correct_small=True, samples_large=drawn))
        prompts.append([1, token])
    run, _ = await trained(Outcomes.of(rows), prompts, WhatSamplesAdd(4, "large"), epochs=60)
    assert run.artifact.kind == MARGINALS_PROBE
    second = run.report["predictions"]["delta_2"]
    assert second["squared_error"] < 0.8 * second["constant_squared_error"]


async def test_the_report_shows_allocation_beside_uniform_and_oracle():
    outcomes, prompts = planted(800, samples=8)
    run, _ = await trained(outcomes, prompts, WhoIsRight())
    report = run.report["allocation"]["small"]
    assert report["most"] == 8
    for line in report["budgets"]:
        ways = {name: line[name]["answered"]["value"] for name in ("oracle", "predicted", "uniform")}
        assert ways["oracle"] >= ways["predicted"] - 1e-9
        assert line["predicted"]["samples"] <= line["average"] + 1e-9
        assert line["bins"]["samples"] <= line["average"] * 1.25
    second = report["budgets"][1]
    assert second["predicted"]["answered"]["value"] > second["uniform"]["answered"]["value"]
    assert report["budgets"][0]["uniform"] == report["budgets"][0]["predicted"]


async def test_the_report_says_what_the_small_models_own_confidence_is_worth():
    outcomes, prompts = planted(400)
    rows = [
        row.model_copy(
            update={
                "samples_small": tuple(
                    each.model_copy(update={"logprob": -0.1 if each.reward else -0.5 - number / 1000})
                    for each in row.samples("small")
                )
            }
        )
        for number, row in enumerate(outcomes.rows)
    ]
    run, _ = await trained(Outcomes.of(rows), prompts, WhoIsRight(), epochs=5)
    report = run.report["confidence"]
    assert report["logprob"]["auc"]["value"] == 1.0
    assert report["entropy"]["auc"]["value"] == 0.5
    assert -0.9 < report["logprob"]["thresholds"]["0.3"] < -0.5


async def test_reading_prompts_costs_one_small_forward_each_and_leaves_nothing_behind():
    _, prompts = planted(40)
    pool = models()
    inputs = await read_prompts(pool, prompts, lambda *_: None)
    assert inputs.shape == (40, 16 + 4)
    assert (pool.small.forwards, pool.large.forwards, len(pool.small.cached)) == (40, 0, 0)


@pytest.mark.parametrize(
    ("epochs", "said"), [(1, "no epoch has a finite loss, lower it"), (2, "the loss of step 2 is not finite, lower it")]
)
async def test_a_loss_that_is_not_finite_is_refused(epochs: int, said: str) -> None:
    with pytest.raises(TurnoutError, match=rf"learning_rate: is 1e\+30; {said}"):
        await trained(*planted(60), WhoIsRight(), learning_rate=1e30, epochs=epochs)
