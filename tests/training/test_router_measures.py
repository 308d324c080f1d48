"""Calibration of predicted chances, and what routing by them is worth, against numbers worked out by hand."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from training.router_calibration import fit_scaling, isotonic, temperature
from training.router_measures import (
    Interval,
    Routed,
    calibration_interval,
    prediction_report,
    recovered,
    reliability,
    routing_report,
    threshold_for,
)
from turnout.errors import TurnoutError


def test_temperature_undoes_a_scale():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 1, generator=generator) * 2
    labels = torch.bernoulli(logits.sigmoid(), generator=generator)
    assert temperature(logits * 3.0, labels, "chances") == pytest.approx(3.0, rel=0.1)
    scaled = fit_scaling("temperature", "chances", logits * 3.0, labels)((logits * 3.0).numpy())
    assert scaled == pytest.approx(logits.sigmoid().numpy(), abs=0.05)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_labels_that_are_all_alike_make_nobody_surer(label: float):
    """Four prompts that all came out the same would turn a chance of 0.4 into 0.0003."""
    outputs, labels = torch.tensor([-0.4, 0.3, 0.1, -0.2]), torch.full((4,), label)
    assert temperature(outputs, labels, "chances") == 1.0
    assert temperature(torch.randn(4, 3), torch.tensor([[0.0, 1.0, 0.0]] * 4), "choice") == 1.0
    assert temperature(outputs, torch.tensor([0.0, 1.0, 0.0, 1.0]), "chances") != 1.0


def test_an_isotonic_map_undoes_any_rising_one():
    rng = np.random.default_rng(0)
    true = rng.random(20_000)
    x, y = isotonic(true**3, (rng.random(20_000) < true).astype(float))
    assert np.abs(np.interp(true**3, x, y) - true).mean() < 0.03
    assert y == sorted(y)
    with pytest.raises(TurnoutError, match="calibration: must be temperature for a choice"):
        fit_scaling("isotonic", "choice", torch.zeros(2, 3), torch.eye(3)[:2])


def test_a_reliability_diagram_by_hand():
    scores, labels = np.array([0.05, 0.11, 0.19, 1.0]), np.array([0.0, 1.0, 0.0, 1.0])
    found = [(each.low, each.count, each.predicted, each.observed.value) for each in reliability(scores, labels)]
    assert found == [(0.0, 1, 0.05, 0.0), (0.1, 2, pytest.approx(0.15), 0.5), (0.9, 1, 1.0, 1.0)]
    report = prediction_report(scores, labels, 0.5)
    assert report["expected_calibration_error"]["value"] == pytest.approx((0.05 + 0.7 + 0.0) / 4)
    low, value, high = (report["auc"][key] for key in ("low", "value", "high"))
    assert low <= value == 0.75 <= high


def routed(small, large, predicted, cheap=None, dear=None) -> Routed:
    num = len(small)
    arrays = (small, large, predicted, cheap or [0.0] * num, dear or [1.0] * num)
    return Routed(*(np.array(each, dtype=np.float64) for each in arrays))


@pytest.mark.parametrize(("tilt", "true"), [(0.8, 0.05), (0.4, 0.15), (1.0, 0.0)])
def test_the_interval_of_a_calibration_error_holds_the_true_one(tilt: float, true: float) -> None:
    """Chances that are pulled towards a half: by bins of a tenth, |s - p(s)| is (1 - tilt) / 4 on average."""
    rng, num, held = np.random.default_rng(3), 600, 0

    def interval(trial: int) -> Interval:
        scores = rng.random(num)
        labels = (rng.random(num) < 0.5 + tilt * (scores - 0.5)).astype(np.float64)
        return calibration_interval(scores, labels, trial, rounds=100)

    for found in map(interval, range(100)):
        assert found.low <= found.value <= found.high
        held += found.low <= true <= found.high
    assert held >= 90


def test_recovered_gain_by_hand():
    """Two prompts gain, one loses, one is indifferent."""
    small, large = [0, 1, 0, 1], [1, 1, 1, 0]
    oracle = routed(small, large, [1, 0, 1, -1])
    assert recovered(oracle) == pytest.approx(1.0)
    assert recovered(routed(small, large, [-1, 0, -1, 1])) < 0
    # At half the cost: the oracle adds 2/4, random 1/8; this router one of the two, 1/4.
    half = routed(small, large, [1, 0.5, 0.2, 0.1])
    assert recovered(half, (0.5,)) == pytest.approx((0.25 - 0.125) / (0.5 - 0.125))
    assert recovered(routed([1, 1], [1, 1], [0.1, 0.2])) == 0.0


def test_random_predictions_recover_nothing_and_dear_prompts_count_by_their_cost():
    rng = np.random.default_rng(0)
    found = []
    for _ in range(200):
        num = 200
        small, large = rng.random(num) < 0.5, rng.random(num) < 0.8
        dear = rng.uniform(1.0, 2.0, num).tolist()
        found.append(recovered(routed(small, large, rng.random(num), None, dear)))
    assert np.mean(found) == pytest.approx(0.0, abs=0.02)
    # The gain per cost decides for the oracle: the cheap prompt first.
    x, added = routed([0, 0], [1, 1], [0.9, 0.1], None, [9.0, 1.0]).oracle
    assert (x.tolist(), added.tolist()) == ([0.0, 0.1, 1.0], [0.0, 0.5, 1.0])


def test_where_the_large_answer_is_the_cheaper_one_it_saves():
    """By hand: extra costs of 2, -2, 4 and 2, between 7 for the small and 13 for the large model alone."""
    made = routed([0, 1, 0, 1], [1, 1, 1, 0], [0.9, 0.8, 0.1, -0.5], [1.0, 4.0, 1.0, 1.0], [3.0, 2.0, 5.0, 3.0])
    x, added = made.oracle
    assert x == pytest.approx([-1 / 3, 0.0, 2 / 3, 1.0, 4 / 3])  # cheap all over, then dear one by one
    assert added.tolist() == [0.0, 0.25, 0.5, 0.5, 0.25]
    curve = {point["share"]: point for point in routing_report(made)["curve"]}
    assert [curve[s]["cost"] * 13 for s in (0.0, 0.25, 0.5, 0.75, 1.0)] == pytest.approx([7, 9, 7, 11, 13])
    assert [curve[s]["oracle"] for s in (0.5, 0.75, 1.0)] == pytest.approx([0.75, 1.0, 1.0])
    dear = routed([0, 1], [1, 0], [-0.5, 0.5], [2.0, 2.0], [1.0, 5.0])  # the second alone costs more than both
    [half] = [point for point in routing_report(dear)["curve"] if point["share"] == 0.5]
    assert (half["cost"], half["quality"], half["random"]) == (pytest.approx(7 / 6), 0.0, 0.5)


def test_no_choice_between_the_models_beats_the_oracle_at_its_cost():
    rng, num = np.random.default_rng(2), 8
    choices = np.array(list(product((False, True), repeat=num)))
    for _ in range(50):
        small, large = rng.random(num), rng.random(num)
        cheap, dear = rng.random(num), rng.random(num) + rng.choice([0.0, 0.5, 1.0])
        made = routed(small, large, rng.random(num), cheap.tolist(), dear.tolist())
        if dear.sum() <= cheap.sum():
            continue
        cost = np.where(choices, dear - cheap, 0.0).sum(axis=1) / (dear - cheap).sum()
        added = np.where(choices, large - small, 0.0).mean(axis=1)
        assert (np.interp(cost, *made.oracle) >= added - 1e-9).all()
        assert recovered(made) <= 1.0 + 1e-9


def test_models_that_cost_the_same_are_told_apart_by_prompts():
    made = routed([0, 1, 0, 1], [1, 1, 1, 0], [1, 0, 1, -1], [1.0] * 4, [1.0] * 4)
    assert recovered(made) == pytest.approx(1.0)
    assert made.oracle[0].tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [point["cost"] for point in routing_report(made)["curve"]] == pytest.approx([1.0] * 21)


def test_the_curve_ends_with_the_models_alone():
    rng = np.random.default_rng(1)
    small, large = (rng.random(300) < 0.4) * 1.0, (rng.random(300) < 0.8) * 1.0
    report = routing_report(routed(small, large, rng.random(300), [0.1] * 300))
    first, last = report["curve"][0], report["curve"][-1]
    assert (first["quality"], first["cost"]) == pytest.approx((small.mean(), 0.1))
    assert (last["quality"], last["cost"]) == (pytest.approx(large.mean()), 1.0)
    assert all(point["oracle"] >= max(point["quality"], point["random"]) - 1e-9 for point in report["curve"])
    assert report["large_only"]["low"] < report["large_only"]["value"] < report["large_only"]["high"]
    for point in report["curve"]:
        low, high = point["quality_interval"]
        assert low < point["quality"] < high
        assert 0.05 < high - low < 0.2  # 300 prompts
        assert point["cost_interval"][0] <= point["cost"] <= point["cost_interval"][1]
    assert last["quality_interval"] == pytest.approx(
        [report["large_only"]["low"], report["large_only"]["high"]], abs=0.02
    )


def test_both_errors_by_hand():
    """In falling order of predicted gain: hard, easy, easy, hard."""
    report = routing_report(routed([0, 1, 0, 1], [1, 1, 1, 0], [0.9, 0.5, -0.2, 0.1]))
    points = {point["share"]: point for point in report["curve"]}
    assert (report["hard"], report["easy"]) == (0.5, 0.5)
    found = [(points[s]["hard_sent_small"], points[s]["easy_sent_large"]) for s in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert found == [(1.0, 0.0), (0.5, 0.0), (0.5, 0.5), (0.5, 1.0), (0.0, 1.0)]
    # Wilson's of one of two and of none of two; where nothing is decided, nothing is uncertain.
    assert points[0.5]["hard_sent_small_interval"] == pytest.approx([0.0945, 0.9055], abs=1e-4)
    assert points[0.25]["easy_sent_large_interval"] == pytest.approx([0.0, 0.6576], abs=1e-4)
    assert points[0.0]["hard_sent_small_interval"] == [1.0, 1.0]
    assert points[1.0]["easy_sent_large_interval"] == [1.0, 1.0]


def test_errors_of_prompts_that_were_answered_several_times_are_weighed():
    """Hard with chances 0.25 and 0, easy with 0.5 and 1; the first prompt goes to the large model."""
    report = routing_report(routed([0.5, 1.0], [0.5, 0.5], [1.0, 0.0]))
    half = next(point for point in report["curve"] if point["share"] == 0.5)
    assert (report["hard"], report["easy"]) == (0.125, 0.75)
    assert (half["hard_sent_small"], half["easy_sent_large"]) == pytest.approx((0.0, 0.5 / 1.5))
    # As 1.5^2 / (0.5^2 + 1^2) = 1.8 whole prompts.
    assert half["easy_sent_large_interval"] == pytest.approx([0.0416, 0.8520], abs=1e-4)


def test_an_error_that_no_prompt_allows_has_no_rate():
    report = routing_report(routed([1, 1], [1, 0], [0.2, 0.1]))
    assert report["hard"] == 0.0
    assert {point["hard_sent_small"] for point in report["curve"]} == {None}
    assert {point["hard_sent_small_interval"] for point in report["curve"]} == {None}
    assert report["curve"][-1]["easy_sent_large"] == 1.0


def test_thresholds_lie_between_the_prompts_they_part():
    ranked = np.array([0.9, 0.5, 0.1, -0.2])
    assert threshold_for(ranked, 0.5) == pytest.approx(0.3)
    assert threshold_for(ranked, 0.0) >= 0.9
    assert threshold_for(ranked, 1.0) < -0.2
