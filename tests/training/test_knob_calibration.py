"""Calibrating on models made of a function: the setting found does on fresh questions what was asked of it."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from decoding.calibration import Span
from decoding.fakes import ListText, TableModel, pair
from decoding.methods.step_speculation import StepSpeculationParams
from decoding.model import ModelPool
from training.calibration_data import Question, QuestionSet
from training.knob_calibration import Calibrator, Target, calibratable
from training.question_runs import Bench, ratio
from turnout.cost import paper_cost
from turnout.errors import Code, TurnoutError
from turnout.registry import get_method
from turnout.types import SamplingParams

VOCAB = 12
TEXTS = ListText([".", " a", " b", " c", "!", " d", " e", " x", "\n", " f", " g", " h"])
SETTING = {"window": 1, "min_stay": 1, "effect": "current"}


def models() -> ModelPool:
    """The small model is the large one behind noise, so it errs where the distribution is flat."""
    table = torch.randn((VOCAB, VOCAB, VOCAB), generator=torch.Generator().manual_seed(2)) * 2
    table *= torch.rand((VOCAB, VOCAB, 1), generator=torch.Generator().manual_seed(1002)) * 2
    noise = torch.randn(table.shape, generator=torch.Generator().manual_seed(99)) * 0.8
    rough = table + noise
    small = TableModel("small", lambda tokens: rough[tokens[-2], tokens[-1]], VOCAB, num_parameters=3)
    large = TableModel("large", lambda tokens: table[tokens[-2], tokens[-1]], VOCAB, num_parameters=30)
    return pair(small, large, TEXTS)


def questions(first: int, count: int = 24, judge: Any = None) -> QuestionSet:
    asked = tuple(Question(f"{index % VOCAB} {index // VOCAB % VOCAB}", judge) for index in range(first, first + count))
    return QuestionSet(asked, "agreement" if judge is None else "exact", "here", "0" * 32)


def bench(temperature: float = 1.0, seed: int = 0, max_tokens: int = 32) -> Bench:
    return Bench(
        models(),
        encode=lambda text: [int(part) for part in text.split()],
        decode=lambda ids: " ".join(map(str, ids)),
        eos_ids=frozenset(),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=temperature),
        seed=seed,
    )


def calibrator(method: str = "entropy_adaptive", params: dict[str, Any] | None = None, **options: Any) -> Calibrator:
    chosen = SETTING if params is None and method == "entropy_adaptive" else params or {}
    return Calibrator(options.pop("bench", bench()), questions(0), method, chosen, num_points=5, **options)


@pytest.fixture(scope="module")
def shared() -> Calibrator:
    """For tests that differ in the target only: what has been run for one is not run again for another."""
    return calibrator()


@pytest.fixture(scope="module")
def measured(shared):
    """One calibration for 30% large tokens, shared by the tests that only look."""
    return asyncio.run(shared.measure(Target(large_share=0.3)))


async def test_the_setting_found_gives_the_share_on_fresh_questions(measured):
    found = measured.calibration
    threshold = found.setting(found.chosen)
    run = await bench(seed=7).run(questions(24, 60).questions, "entropy_adaptive", {**SETTING, "threshold": threshold})
    assert run.large_share == pytest.approx(0.3, abs=0.06)
    nearest = min(found.points, key=lambda point: abs(point.position - found.chosen))
    assert nearest.large_share.value == pytest.approx(0.3, abs=0.05)
    assert nearest.large_share.low < 0.3 < nearest.large_share.high


def test_the_curve_runs_from_the_small_model_alone_towards_the_large_one(measured):
    points = measured.calibration.points
    shares = [point.large_share.value for point in points]
    thresholds = [point.value for point in points]
    assert shares[0] == 0.0
    assert shares == sorted(shares)
    assert thresholds == sorted(thresholds, reverse=True)
    assert points[0].retained.high < points[-1].retained.low
    assert measured.calibration.basis.large_quality == Span(1.0, 1.0, 1.0)
    for point in points:  # a hand-over drops the token that caused it: one of the small or of the large model
        kept = paper_cost(point.large_share.value, 3, 30)
        assert kept < point.paper.value < kept + point.large_share.value or point.large_share.value == 0.0
        assert point.large_share.low <= point.large_share.value <= point.large_share.high
        assert sum(point.seen) > 0
    # Where both models take turns, nearly every token passes through both: FLOPs are not the paper's cost.
    assert max(point.flops.value - point.paper.value for point in points) > 0.1
    assert len(measured.wall) == len(points)
    assert all(each.value > 0 for each in measured.wall)


async def test_the_same_seed_gives_the_same_artifact_and_another_seed_another():
    digests, versions = {"small": "a", "large": "b"}, []
    for seed in (0, 0, 1):
        made = await calibrator(bench=bench(seed=seed, max_tokens=10)).measure(Target(large_share=0.3))
        versions.append(made.calibration.to_artifact(digests, "t").version)
    first, again, other = versions
    assert again == first
    assert other != first


async def test_quality_and_budget_are_met_by_what_they_cost(measured, shared):
    met = await shared.measure(Target(quality=0.93))
    for_quality = met.calibration
    assert met.warning == ""
    nearest = min(for_quality.points, key=lambda point: abs(point.position - for_quality.chosen))
    assert nearest.retained.value == pytest.approx(0.93, abs=0.03)
    assert nearest.large_share.value < 0.9
    for meter, budget in (("paper", 0.6), ("flops", 0.95)):
        found = (await shared.measure(Target(budget=budget, meter=meter))).calibration
        [at] = [point for point in found.points if point.position == found.chosen]
        assert budget - 0.06 < getattr(at, meter).value <= budget
        assert found.target == {"budget": budget, "meter": meter}
    free = (await shared.measure(Target(budget=1e6, meter="wall"))).calibration
    assert free.chosen == 1.0


async def test_what_no_setting_reaches_is_refused_with_the_range(measured, shared):
    slow = {"window": 1, "min_stay": 10, "effect": "next"}
    with pytest.raises(TurnoutError) as caught:
        await calibrator(params=slow).measure(Target(large_share=0.99))
    assert caught.value.code is Code.OUT_OF_RANGE
    assert caught.value.message.startswith("target_large_share: no threshold reaches 0.99; reachable: 0.000 to 0.")
    with pytest.raises(TurnoutError, match=r"budget: 0\.01 cannot be kept: the least cost measured is 0\.100"):
        await shared.measure(Target(budget=0.01))


@pytest.mark.parametrize(
    ("method", "params", "low", "high"),
    [
        ("sentence_lead", {"lead_tokens": 3}, 0.0, 1.0),
        ("random_switch", {"mean_run": 6, "min_stay": 2, "start": "small"}, 1 / 6, 5 / 6),
        ("random_switch", {"mean_run": 6, "min_stay": 2, "start": "drawn"}, 1 / 6, 5 / 6),
    ],
)
async def test_methods_without_a_threshold_are_swept_between_their_ends(method, params, low, high):
    found = (await calibrator(method, params).measure(Target(large_share=0.25))).calibration
    assert (found.points[0].value, found.points[-1].value) == (pytest.approx(low), pytest.approx(high))
    nearest = min(found.points, key=lambda point: abs(point.position - found.chosen))
    assert nearest.large_share.value == pytest.approx(0.25, abs=0.04)
    assert (found.edges, found.drift_limit) == ((), 0.0)
    assert found.fixed == params


async def test_a_share_counts_tokens_that_the_large_model_wrote_and_a_switch_dropped():
    """Each forward of the large model writes one token, kept or dropped."""
    asked, asking = questions(0, judge=lambda text: 1.0), bench()
    run = await asking.run(asked.questions, "entropy_adaptive", {**SETTING, "threshold": 1.5})
    large = asking.models.large
    assert isinstance(large, TableModel)
    assert run.by_large.sum() == large.forwards
    assert run.large_share == large.forwards / run.tokens.sum()


async def test_a_band_is_calibrated_above_its_lower_threshold():
    found = (await calibrator(params={**SETTING, "threshold_down": 1.0}).measure(Target(large_share=0.3))).calibration
    assert min(point.value for point in found.points) >= 1.0
    assert found.fixed["threshold_down"] == 1.0
    below, above = ([p for p in found.points if (p.position > found.chosen) is late] for late in (False, True))
    assert below[-1].large_share.value <= 0.3 <= above[0].large_share.value
    assert above[0].position - below[-1].position < 0.1


async def test_judges_tell_quality_where_there_are_some():
    def judge(text: str) -> float:
        return float(int(text.split()[-1]) % 2 == 0)

    asked = questions(0, judge=judge)
    run = await bench().run(asked.questions, "plain", {"model": "small"})
    assert 0.0 < run.quality.mean() < 1.0
    found = (await replace(calibrator(), asked=asked).measure(Target(large_share=0.3))).calibration
    assert found.points[0].quality.value == pytest.approx(float(run.quality.mean()))
    assert found.basis.measure == "exact"


async def test_a_large_model_that_is_never_right_cannot_be_a_measure():
    with pytest.raises(TurnoutError, match="data: the large model answers none of it well"):
        await replace(calibrator(), asked=questions(0, judge=lambda text: 0.0)).measure(Target(quality=0.9))


async def test_answers_that_never_reach_a_switch_are_refused():
    with pytest.raises(TurnoutError, match="data: gives 0 places where a switch is allowed; at least 101 are needed"):
        await calibrator(params={"window": 1, "min_stay": 1000}).measure(Target(large_share=0.3))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: calibratable("plain"),
            "these have: adadec, cascade, entropy_adaptive, random_switch, sentence_lead, step_speculation",
        ),
        (lambda: calibrator(params={"threshold": 1.0}), "param.threshold: is what is calibrated"),
        (lambda: calibrator(params={"calibration": "x"}), "param.calibration: is what is calibrated"),
        (lambda: calibrator(params={"window": 0}), "param.window: "),
        (lambda: Target(), "target: give exactly one"),
        (lambda: Target(large_share=0.3, budget=0.4), "target: give exactly one"),
        (lambda: Target(large_share=30.0), "target-large-share: must be from 0 to 1"),
        (lambda: Target(quality=math.nan), "target-quality: must be from 0 to 2"),
        (lambda: Target(budget=math.inf), "budget: must be at least 0"),
        (lambda: Target(budget=-0.1), "budget: must be at least 0"),
        (lambda: Target(budget=0.4, meter="euro"), "meter: must be one of paper, flops, wall"),
    ],
)
def test_what_makes_no_calibration_is_refused(make, said):
    with pytest.raises(TurnoutError) as caught:
        make()
    assert said in caught.value.message


async def test_prompts_that_leave_no_room_are_named_by_their_row():
    narrow = bench()
    narrow.models.large.max_length = 36
    asked = (*questions(0, 3).questions, Question("1 2 3 4 5", None, row=4))
    with pytest.raises(TurnoutError, match="data: row 4: prompt: 5 tokens; 1 to 4 leave room to answer"):
        narrow.check(asked)


def test_the_interval_of_a_ratio_covers_as_often_as_it_says():
    import numpy as np

    rng = np.random.default_rng(5)
    hits = 0
    for trial in range(200):
        below = rng.integers(5, 60, size=60).astype(float)
        span = ratio(rng.binomial(below.astype(int), 0.3).astype(float), below, trial)
        hits += span.low <= 0.3 <= span.high
    assert 180 <= hits <= 199


@pytest.mark.parametrize(
    ("method", "params"), [("cascade", {"keep_cut": True}), ("entropy_adaptive", {"start": "large", "min_stay": 1})]
)
async def test_the_curve_ends_with_everything_by_the_large_model(method: str, params: dict[str, Any]) -> None:
    made = Calibrator(bench(max_tokens=8), questions(0, 128), method, params, num_points=3)
    found = (await made.measure(Target(large_share=1.0))).calibration
    assert found.points[-1].large_share.value == 1.0


@pytest.mark.parametrize("scorer", [{"name": "self_grade"}, {"name": "reward_model"}])
def test_at_the_end_of_their_range_scorers_keep_no_step(scorer: dict[str, Any]) -> None:
    params = get_method("step_speculation").parse({"scorer": scorer})
    assert isinstance(params, StepSpeculationParams)
    judge = params.model_copy(update={"threshold": params.always}).judge()
    assert judge.chance(9.0 if scorer["name"] == "self_grade" else 1.0) == 0.0


async def test_where_quality_jumps_over_its_target_the_setting_found_reaches_it() -> None:
    """All answers are equally sure: a threshold escalates none of them or all."""
    made = bench(temperature=0.0, max_tokens=8)
    alike = QuestionSet((Question("1 2", None),) * 128, "agreement", "here", "0" * 32)
    found = await Calibrator(made, alike, "cascade", {"keep_cut": True}, num_points=5).measure(Target(quality=0.99))
    setting = found.calibration.setting(found.calibration.chosen)
    [large, cascade] = [
        await made.run(alike.questions, name, params)
        for name, params in (("plain", {}), ("cascade", {"keep_cut": True, "threshold": setting}))
    ]
    assert found.calibration.points[0].retained.value < 0.9
    assert cascade.quality.sum() >= 0.99 * large.quality.sum()


async def test_a_lucky_run_does_not_decide_where_quality_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of five settings was lucky: the curve, made to rise, is what promises."""
    made = calibrator("random_switch", {"mean_run": 4, "min_stay": 1})
    point = made._point

    def lucky(position: float, value: float, run: Any, edges: list[float]) -> Any:
        found = point(position, value, run, edges)
        told = {0.0: 0.8, 0.25: 0.955, 0.5: 0.9, 0.75: 0.9, 1.0: 0.99}.get(position, 0.97)
        return replace(found, retained=Span(told, told, told))

    monkeypatch.setattr(made, "_point", lucky)
    found = (await made.measure(Target(quality=0.95))).calibration
    assert found.chosen > 0.75
    assert found.position_of("here", quality=0.95) == found.chosen


async def test_a_share_that_jumps_over_its_target_is_warned_of() -> None:
    alike = QuestionSet((Question("1 2", None),) * 128, "agreement", "here", "0" * 32)
    made = Calibrator(bench(temperature=0.0, max_tokens=8), alike, "cascade", {"keep_cut": True}, num_points=5)
    assert (await made.measure(Target(large_share=0.3))).warning == (
        "no run came within 0.01 of 0.3: the neighbouring runs gave 0.000 and 1.000"
    )


@pytest.mark.parametrize("weight", ["constant", "clipped", "sigmoid"])
def test_a_scorer_that_keeps_steps_by_chance_is_refused(weight: str) -> None:
    with pytest.raises(TurnoutError, match=r"param\.scorer\.weight: leaves no threshold that parts what is kept"):
        calibrator("step_speculation", {"scorer": {"name": "reward_model", "weight": weight}})
