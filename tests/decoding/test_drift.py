"""Drift of entropies: the index by hand, alarms for planted drift, and none without."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from decoding.artifacts import Artifacts
from decoding.calibration import KnobCalibration
from decoding.drift import DRIFT, WINDOW, DriftWatch, Tally, population_stability
from decoding.fakes import TableModel, pair
from decoding.model import Request
from decoding.sequence import Sequence
from tests.decoding.curves import CURVE
from training.knob_calibration import drift_limit
from turnout.registry import get_method
from turnout.types import SamplingParams

LEVEL = [0.1] * 10


def test_the_index_by_hand():
    assert population_stability([0.5, 0.5], [50, 50]) == pytest.approx(0.0)
    # (50.5, 50.5) against (80.5, 20.5) of 101, half a count added to each bin of both sides.
    shift = (80.5 - 50.5) / 101
    by_hand = shift * math.log(80.5 / 50.5) - shift * math.log(20.5 / 50.5)
    assert population_stability([0.5, 0.5], [80, 20]) == pytest.approx(by_hand)
    assert math.isfinite(population_stability([1.0, 0.0], [0, 100]))


def test_a_tally_counts_values_between_its_edges():
    tally = Tally([0.5, 1.0])
    for value in (0.0, 0.5, 0.6, 1.0, 1.1, 9.0):
        tally.add(value)
    assert tally.counts == [2, 2, 2]


def answers(rng: np.random.Generator, count: int, shift: float = 0.0) -> np.ndarray:
    """Counts of answers whose values hang together, as those of one text do: [count, 10]."""
    means = rng.normal(shift, 0.5, size=(count, 1))
    values = means + rng.normal(0.0, 1.0, size=(count, 20))
    edges = np.quantile(rng.normal(0.0, math.sqrt(1.25), size=100_000), np.arange(1, 10) / 10)
    return np.stack([np.bincount(np.searchsorted(edges, row), minlength=10) for row in values])


def feed(watch: DriftWatch, counts: np.ndarray, expected: list[float] = LEVEL) -> list[bool]:
    readings = [watch.add(row.tolist(), expected) for row in counts]
    return [reading is not None and reading.index > reading.limit for reading in readings]


@pytest.mark.parametrize("count", [5_000, pytest.param(20_000, marks=pytest.mark.exactness)])
def test_false_alarms_are_rare_though_tokens_of_an_answer_hang_together(count):
    rng = np.random.default_rng(0)
    calibrated = answers(rng, 200)
    limit = drift_limit(calibrated.astype(float), seed=0)
    expected = (calibrated.sum(axis=0) / calibrated.sum()).tolist()
    assert 0.25 <= limit < 0.5
    alarms = feed(DriftWatch("x", "v", limit), answers(rng, count), expected)
    assert sum(alarms) == 0
    # The window's own noise is what the limit is about: without its floor it is rarely, not never, exceeded.
    bare = _bare_limit(calibrated, rng)
    rate = np.mean(feed(DriftWatch("x", "v", bare), answers(rng, count), expected))
    assert rate < 0.02


def _bare_limit(calibrated: np.ndarray, rng: np.random.Generator) -> float:
    drawn = [
        population_stability(
            (calibrated.sum(axis=0) / calibrated.sum()).tolist(),
            calibrated[rng.integers(0, len(calibrated), WINDOW)].sum(axis=0).tolist(),
        )
        for _ in range(500)
    ]
    return 2.0 * max(drawn)


def test_planted_drift_is_noticed_within_a_window_logged_once_and_goes_away(caplog):
    rng = np.random.default_rng(1)
    watch = DriftWatch("mine", "abc", 0.25)
    with caplog.at_level(logging.INFO, logger="decoding.drift"):
        assert not any(feed(watch, answers(rng, 400)))
        assert caplog.records == []
        alarms = feed(watch, answers(rng, WINDOW, shift=1.2))
        assert alarms[-1]
        assert 5 < alarms.index(True) < WINDOW
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "calibration mine (version abc)" in caplog.text
        assert not feed(watch, answers(rng, WINDOW + 1))[-1]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_nothing_is_said_before_the_window_is_full_nor_of_answers_without_a_place_to_switch():
    watch = DriftWatch("x", "v", 0.25, window=3)
    far = [0] * 9 + [50]
    assert watch.add(far, LEVEL) is None
    assert watch.add([0] * 10, LEVEL) is None
    assert watch.add(far, LEVEL) is None
    reading = watch.add(far, LEVEL)
    assert reading is not None
    assert (reading.answers, reading.calibration, reading.version) == (3, "x", "v")
    assert reading.index > 1.0


def test_answers_at_several_settings_are_expected_to_be_a_mixture():
    watch = DriftWatch("x", "v", 0.25, window=2)
    watch.add([90, 10], [0.9, 0.1])
    mixed = watch.add([20, 80], [0.2, 0.8])
    assert mixed is not None
    assert mixed.index == pytest.approx(0.0, abs=1e-9)


@pytest.fixture
def flat(tmp_path):
    """A pool whose small model is as unsure as told, and a calibration made where it was sure nine times in ten."""

    class Moody(TableModel):
        scale = 0.0

    small = Moody("small", lambda tokens: small.scale * torch.arange(8.0) * (1 + len(tokens) % 3), 8)
    large = TableModel("large", lambda _: torch.zeros(8), 8)
    models = replace(pair(small, large), artifacts=Artifacts(tmp_path))
    curve = replace(CURVE, points=tuple(replace(point, seen=(90, 10)) for point in CURVE.points))
    curve.to_artifact({"small": small.digest, "large": large.digest}, "test").save(tmp_path / "mine.safetensors")
    assert isinstance(curve, KnobCalibration)
    return small, models


async def test_a_method_watches_its_entropies_and_says_so_in_the_answer(flat, caplog):
    small, models = flat
    info = get_method("entropy_adaptive")
    params = info.parse({"calibration": "mine", "large_share": 0.05})

    async def ask(seed: int) -> Request:
        request = Request("r", Sequence([1, 2], SamplingParams(max_tokens=12), seed), tenant=f"t{seed % 2}")
        async for _ in info.run(request, models, params):
            pass
        return request

    small.scale = 4.0  # sure: every mean below the one edge at 1 bit
    done = [await ask(seed) for seed in range(WINDOW)]
    assert DRIFT not in done[-2].extra
    assert done[-1].extra[DRIFT].answers == WINDOW
    small.scale = 0.0  # 3 bits everywhere
    drifted = [await ask(seed) for seed in range(WINDOW)]
    reading = drifted[-1].extra[DRIFT]
    assert reading.index > reading.limit == 0.25
    assert any("what is seen has left the range of calibration mine" in note for note in drifted[-1].notes)
    assert "calibrate again" in caplog.text


def test_limits_follow_from_the_answers_and_not_from_luck():
    rng = np.random.default_rng(3)
    few = answers(rng, 12).astype(float)
    many = answers(rng, 400).astype(float)
    assert drift_limit(many, 0) == drift_limit(many, 0) >= 0.25
    assert drift_limit(few * 0, 0) == 0.25
