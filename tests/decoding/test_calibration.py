"""Calibrations: what a curve says about a target, and that a request gets exactly that setting or a reason."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from decoding.artifacts import ENTRY, Artifact, Artifacts
from decoding.calibrated_params import check_method
from decoding.calibration import KIND, RAN, KnobCalibration, isotonic
from decoding.drift import STORE, DriftWatch
from decoding.fakes import pair
from decoding.model import ModelPool, Request
from decoding.sequence import Sequence
from router.base import make_policy
from tests.decoding.curves import BASIS, CURVE, FIXED, point
from tests.router.asking import asked
from turnout.errors import Code, TurnoutError
from turnout.part_choice import PartChoice
from turnout.registry import get_method
from turnout.types import SamplingParams


def test_a_target_is_met_by_hand_worked_interpolation():
    at = CURVE.position_of("here", large_share=0.15)
    assert at == pytest.approx(0.25)
    assert CURVE.setting(at) == pytest.approx(2.0)
    assert CURVE.setting(CURVE.position_of("here", large_share=0.4)) == pytest.approx(0.6)
    # 0.93 lies half-way between 0.90 and 0.96; it is promised where it was measured to be reached.
    assert CURVE.setting(CURVE.expected_at("here", 0.93)) == pytest.approx(0.6)
    assert CURVE.position_of("here", quality=0.93) == 1.0
    assert CURVE.position_of("here", quality=0.9) == 0.5
    assert CURVE.position_of("here") == 0.25
    assert CURVE.expected(0.25) == pytest.approx([0.65, 0.35])


def test_the_ends_are_reachable_and_nothing_beyond():
    assert CURVE.setting(CURVE.position_of("here", large_share=0.0)) == 3.0
    assert CURVE.setting(CURVE.position_of("here", large_share=0.5)) == pytest.approx(0.2)
    # The small model alone is good enough.
    assert CURVE.position_of("here", quality=0.4) == 0.0
    for target, said in (
        ({"large_share": 0.51}, "here: no threshold reaches 0.51; reachable: 0.000 to 0.500"),
        ({"quality": 0.97}, "here: no threshold reaches 0.97; reachable: 0.600 to 0.960"),
    ):
        with pytest.raises(TurnoutError) as caught:
            CURVE.position_of("here", **target)
        assert (caught.value.code, caught.value.message) == (Code.OUT_OF_RANGE, said)


def test_a_lucky_point_promises_nothing():
    lucky = replace(CURVE, points=(CURVE.points[0], point(0.5, 1.0, 0.3, 0.99), point(1.0, 0.2, 0.5, 0.91)))
    with pytest.raises(TurnoutError, match=r"reachable: 0\.600 to 0\.950"):
        lucky.position_of("here", quality=0.97)
    assert lucky.position_of("here", quality=0.95) == pytest.approx(0.5)


def test_a_quality_that_a_point_has_is_promised_by_that_point():
    rng = random.Random(3)
    for _ in range(20):
        places = sorted(rng.random() for _ in range(7))
        qualities = sorted(rng.random() for _ in range(7))
        points = tuple(point(at, 1.0, 0.1, quality) for at, quality in zip(places, qualities, strict=True))
        curve = replace(CURVE, points=points)
        assert [curve.position_of("here", quality=quality) for quality in qualities] == places


def test_a_budget_takes_the_last_position_it_pays_for():
    assert CURVE.position_within("budget", 0.37, [0.1, 0.37, 0.55]) == pytest.approx(0.5)
    assert CURVE.position_within("budget", 0.46, [0.1, 0.37, 0.55]) == pytest.approx(0.75)
    # A cost that falls again late is still within the budget there.
    assert CURVE.position_within("budget", 1.0, [0.1, 1.2, 0.9]) == 1.0
    with pytest.raises(TurnoutError, match=r"budget: 0\.05 cannot be kept: the least cost measured is 0\.100"):
        CURVE.position_within("budget", 0.05, [0.1, 0.37, 0.55])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_isotonic_rises_keeps_the_sum_and_leaves_rising_values_alone(values):
    found = isotonic(values)
    assert all(low <= high for low, high in itertools.pairwise(found))
    assert sum(found) == pytest.approx(sum(values))
    assert isotonic(sorted(values)) == pytest.approx(sorted(values))


def test_isotonic_by_hand():
    assert isotonic([1.0, 3.0, 2.0, 4.0]) == [1.0, 2.5, 2.5, 4.0]
    assert isotonic([3.0, 2.0, 1.0]) == [2.0, 2.0, 2.0]


# ---- requests ----


@pytest.fixture
def models(make_model, tmp_path) -> ModelPool:
    return replace(pair(make_model("small", 1), make_model("large", 2)), artifacts=Artifacts(tmp_path))


def save(models: ModelPool, name: str = "mine", curve: KnobCalibration = CURVE, **digests: str) -> Artifact:
    made = curve.to_artifact({"small": "table small", "large": "table large", **digests}, "test")
    assert models.artifacts.folder is not None
    made.save(models.artifacts.folder / f"{name}.safetensors")
    return made


async def answer(models: ModelPool, params: dict[str, Any], method: str = "entropy_adaptive", seed: int = 3) -> Request:
    info = get_method(method)
    request = Request("r", Sequence([1, 2], SamplingParams(max_tokens=60), seed))
    async for _ in info.run(request, models, info.parse(params)):
        pass
    return request


async def test_a_calibrated_request_is_the_one_with_its_threshold(models):
    made = save(models)
    by_hand = await answer(models, {"threshold": 2.0, "window": 1, "min_stay": 2, "effect": "current"})
    for params in ({"large_share": 0.15}, {}, {"large_share": 0.15, "window": 1, "effect": "current"}):
        found = await answer(models, {"calibration": "mine", **params})
        assert found.sequence.generated == by_hand.sequence.generated
        assert found.extra[RAN] == {**FIXED, "threshold": pytest.approx(2.0)}
        [note] = found.notes
        assert note.startswith(f"calibration mine, version {made.version}: threshold 2 (effect current, min_stay 2, ")
    assert by_hand.sequence.meter.switches > 3
    assert by_hand.notes == []


async def test_a_replaced_artifact_holds_from_the_next_request_on(models):
    first = save(models)
    before = await answer(models, {"calibration": "mine", "large_share": 0.3})
    second = save(models, curve=replace(CURVE, grid=((0.0, 4.0), (0.5, 1.5), (1.0, 0.2))))
    path = models.artifacts.folder / "mine.safetensors"
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 10**9))
    after = await answer(models, {"calibration": "mine", "large_share": 0.3})
    assert (before.extra[RAN]["threshold"], after.extra[RAN]["threshold"]) == (1.0, 1.5)
    assert first.version != second.version
    assert f"version {first.version}:" in before.notes[0]
    assert f"version {second.version}:" in after.notes[0]


SPOILT: dict[str, Callable[[ModelPool, Path], object]] = {
    "gone": lambda models, path: path.unlink(),
    "cut off": lambda models, path: path.write_bytes(path.read_bytes()[:40]),
    "no json": lambda models, path: save_file({"w": torch.zeros(1)}, path, {ENTRY: "{"}),
    "another shape": lambda models, path: save_file(
        {"w": torch.zeros(1)}, path, {ENTRY: json.dumps({"format": 1, "colour": "red"})}
    ),
    "of another pair": lambda models, path: save(models, large="elsewhere"),
    "of another window": lambda models, path: save(models, curve=replace(CURVE, fixed={**FIXED, "window": 9})),
    "below the target": lambda models, path: save(models, curve=replace(CURVE, points=CURVE.points[:2])),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT.keys())
async def test_a_default_goes_on_with_the_last_calibration_that_fitted(models, spoil, caplog):
    good = save(models)
    default = {"calibration": "mine", "quality": 0.96, "window": 1}
    parsed = get_method("entropy_adaptive").parse(default)
    check_method(models, "entropy_adaptive", parsed, "pools.p.default.params")
    before = await answer(models, default)
    path = models.artifacts.folder / "mine.safetensors"
    spoil(models, path)
    for _ in range(2):
        after = await answer(models, default)
        assert (after.extra[RAN], after.notes) == (before.extra[RAN], before.notes)
    [record] = caplog.records
    assert f"going on with version {good.version}" in record.message
    with pytest.raises(TurnoutError):  # who asks for something else is told that it is not to be had
        await answer(models, {**default, "quality": 0.95, "window": 3})
    again = save(models, curve=replace(CURVE, grid=((0.0, 6.0), (0.5, 5.0), (1.0, 0.7))))
    assert f"version {again.version}:" in (await answer(models, default)).notes[0]


CALIBRATED = {"name": "entropy_adaptive", "calibration": "nope"}
LACKING = [
    ("monitored", {"inner": CALIBRATED}, "inner.calibration"),
    ("monitored", {"inner": {"name": "monitored", "inner": CALIBRATED}}, "inner.inner.calibration"),
    ("monitored", {"inner": {"name": "speculative", "verifier": "judge"}}, "inner.verifier.artifact"),
    ("monitored", {"monitor": "enough"}, "monitor.artifact"),
    ("speculative", {"verifier": "judge"}, "verifier.artifact"),
    ("speculative", {"drafter": "medusa"}, "drafter.artifact"),
    ("speculative", {"length": "specdecpp"}, "length.artifact"),
    ("step_speculation", {"scorer": "reward_model"}, "scorer.artifact"),
    ("best_of", {"rerank": "reward"}, "scorer.artifact"),
]


@pytest.mark.parametrize(("name", "params", "field"), LACKING)
def test_a_method_with_a_part_that_lacks_its_file_is_refused_at_start(models, name, params, field):
    parsed = get_method(name).parse(params)
    with pytest.raises(TurnoutError) as caught:
        check_method(models, name, parsed, "pools.p.default.params")
    assert caught.value.code == Code.NOT_FOUND
    assert caught.value.field == f"pools.p.default.params.{field}"
    assert caught.value.message.startswith(f"pools.p.default.params.{field}: '")


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("speculative", {"verifier": "judge", "fallback": "plain"}),
        ("monitored", {"monitor": {"name": "enough", "threshold": 0.5}}),
        ("best_of", {"k": 2}),
        ("plain", {}),
    ],
)
def test_a_method_that_does_without_is_not_refused(models, name, params):
    check_method(models, name, get_method(name).parse(params), "pools.p.default.params")


async def test_a_parameter_beside_a_default_leaves_it_its_last_calibration(models):
    """What the calibration says nothing about is the request's to set, whatever has become of the file."""
    save(models)
    default = {"calibration": "mine", "quality": 0.96}
    parsed = get_method("entropy_adaptive").parse(default)
    check_method(models, "entropy_adaptive", parsed, "pools.p.default.params")
    before = await answer(models, default)
    (models.artifacts.folder / "mine.safetensors").unlink()
    beside = await answer(models, {**default, "catch_up": "lazy"})
    assert (beside.extra[RAN], beside.notes) == (before.extra[RAN], before.notes)


@pytest.mark.parametrize(
    ("params", "field", "said"),
    [
        ({"window": 5}, "window", "is 5, but calibration 'mine' was made with 1"),
        ({"effect": "next"}, "effect", "is next, but calibration 'mine' was made with current"),
        ({"min_stay": 3, "window": 1}, "min_stay", "is 3, but calibration 'mine' was made with 2"),
        ({"large_share": 0.7}, "large_share", "no threshold reaches 0.7; reachable: 0.000 to 0.500"),
        ({"quality": 0.99}, "quality", "reachable: 0.600 to 0.960"),
        ({"calibration": "yours"}, "calibration", "'yours' is not known; available: mine"),
        ({"calibration": "other_pair"}, "calibration", "was made for the large model with digest elsewhere"),
        ({"calibration": "other_kind"}, "calibration", "is of the kind 'disco'; 'calibration' is needed"),
        ({"calibration": "other_method"}, "calibration", "was made for the method 'sentence_lead', not"),
        ({"calibration": "other_shape"}, "calibration", "is no calibration that this version can read (points)"),
        ({"calibration": "pointless"}, "calibration", "is no calibration: points has no two entries"),
    ],
)
async def test_what_does_not_fit_is_refused_before_a_token_is_written(models, tmp_path: Path, params, field, said):
    save(models)
    misfits = {
        "other_pair": CURVE.to_artifact({"large": "elsewhere"}, "test"),
        "other_kind": Artifact("disco", "test", {}, {}, {}),
        "other_method": replace(CURVE, method="sentence_lead").to_artifact({}, "test"),
        "other_shape": Artifact(KIND, "test", {**CURVE.to_artifact({}, "test").settings, "points": 3}, {}, {}),
    }
    misfits["pointless"] = replace(CURVE, points=CURVE.points[:1]).to_artifact({}, "test")
    name = params.get("calibration", "mine")
    if name in misfits:
        misfits[name].save(tmp_path / f"{name}.safetensors")
    with pytest.raises(TurnoutError) as caught:
        await answer(models, {"calibration": "mine", **params})
    assert caught.value.field == f"method.params.{field}"
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"calibration": "x", "threshold": 0.5}, "give threshold or calibration, not both"),
        ({"large_share": 0.3}, "large_share is read from a calibration"),
        ({"quality": 0.3}, "quality is read from a calibration"),
        ({"calibration": "x", "large_share": 0.3, "quality": 0.9}, "give large_share or quality, not both"),
        ({"calibration": "../x"}, "pattern"),
    ],
)
def test_contradictions_are_refused_at_once(params, said):
    with pytest.raises(TurnoutError) as caught:
        get_method("entropy_adaptive").parse(params)
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("method", "knob", "fixed"),
    [
        ("sentence_lead", "lead_probability", {"lead_tokens": 2}),
        ("random_switch", "share", {"mean_run": 6.0, "min_stay": 1}),
    ],
)
async def test_the_other_methods_read_their_knob_too(models, method, knob, fixed):
    line = (point(0.0, 0.2, 0.1, 0.5), point(1.0, 0.8, 0.7, 0.9))
    curve = KnobCalibration(method, knob, fixed, BASIS, ((0.0, 0.2), (1.0, 0.8)), line, 0.0, {"large_share": 0.1})
    save(models, curve=curve)
    found = await answer(models, {"calibration": "mine", "large_share": 0.4}, method)
    by_hand = await answer(models, {**fixed, knob: found.extra[RAN][knob]}, method)
    assert found.extra[RAN] == {knob: pytest.approx(0.5), **fixed}
    assert found.sequence.generated == by_hand.sequence.generated
    with pytest.raises(TurnoutError, match=rf"no {knob} reaches 0\.05; reachable: 0\.100 to 0\.700"):
        await answer(models, {"calibration": "mine", "large_share": 0.05}, method)


def test_a_request_replaces_what_would_contradict_it_in_the_pools_defaults():
    over = get_method("entropy_adaptive").params.over
    by_hand = {"threshold": 0.016, "window": 1}
    calibrated = {"calibration": "x", "large_share": 0.3, "window": 1}
    assert over(by_hand, {"calibration": "y"}) == {"calibration": "y"}  # it says its own window
    assert over(calibrated, {"threshold": 0.5}) == {"threshold": 0.5, "window": 1}
    assert over(calibrated, {"quality": 0.9}) == {"calibration": "x", "quality": 0.9, "window": 1}
    assert over(calibrated, {"calibration": "y"}) == {"calibration": "y"}
    assert over(calibrated, {"calibration": "y", "window": 3}) == {"calibration": "y", "window": 3}
    assert over(by_hand, {"window": 3}) == {"threshold": 0.016, "window": 3}


def test_a_calibration_comes_back_from_its_file_as_it_was(tmp_path):
    made = CURVE.to_artifact({"small": "a"}, "test")
    made.save(tmp_path / "x.safetensors")
    loaded = Artifact.load(tmp_path / "x.safetensors")
    assert KnobCalibration.of(loaded, "here") == CURVE
    assert loaded.version == made.version
    assert len(made.version) == 12


async def test_a_budget_names_the_calibration_and_promises_what_its_curve_does(models):
    """The middle point was lucky: what it retained is pooled with what comes after it."""
    lucky = (CURVE.points[0], point(0.5, 1.0, 0.3, 0.99, (5, 5)), point(1.0, 0.2, 0.5, 0.91, (2, 8)))
    made = save(models, curve=replace(CURVE, points=lucky))
    budget = make_policy(PartChoice.of("budget", calibrations=["mine"]), "policy")
    budget.check(models)
    limited = make_policy(PartChoice.of("budget", calibrations=["mine"], quality=0.5), "policy")
    one, other = [(await each.decide(asked(max_cost=0.6), models)).version.split("+") for each in (budget, limited)]
    assert one[0] == other[0] == made.version
    assert one[1] != other[1]  # other limits decide otherwise
    pooled = [(0.0, 0.6), (0.3, 0.95), (0.3, 0.95)]
    for limit, (share, quality) in zip((0.2, 0.4, 0.6), pooled, strict=True):
        decision = await budget.decide(asked(max_cost=limit), models)
        assert decision.params == {**FIXED, "calibration": "mine", "large_share": pytest.approx(share)}
        assert decision.scores["quality"] == pytest.approx(quality)
    found = await answer(models, decision.params, decision.method)
    assert f"calibration mine, version {made.version}: threshold" in found.notes[0]
    kept: dict[str, DriftWatch] = models.small.stores.open(STORE, "", dict)
    assert kept["mine"].index() > 0.0  # the answer was counted
    (models.artifacts.folder / "mine.safetensors").unlink()
    again = await budget.decide(asked(max_cost=0.6), models)
    assert again == decision
    assert (await answer(models, again.params, again.method)).notes == found.notes
