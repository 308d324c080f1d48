"""Statistics against examples worked out by hand, and against simulations in which the truth is known."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from experiments.stats import hypotheses
from experiments.stats.curves import Curve
from experiments.stats.hypotheses import (
    corrected,
    equivalence,
    holm,
    paired_permutation,
    unpaired_permutation,
)
from experiments.stats.intervals import (
    bca_mean,
    mean_score,
    paired_difference,
    ratio,
    resampled,
    score_difference,
    unpaired_difference,
)
from experiments.stats.power import detectable, detectable_between, prompts_needed, statement
from experiments.stats.sequential import ConfidenceSequence, verdict


def test_bca_intervals_cover_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    draws, truth, covered = 250, math.exp(0.125), 0
    for _ in range(draws):
        found = bca_mean(rng.lognormal(0.0, 0.5, 60), seed=2, rounds=600)
        covered += found.low <= truth <= found.high
    # Skewed values, where a symmetric interval misses on one side; 0.95, give or take three standard errors.
    assert 0.89 <= covered / draws <= 0.99


def test_intervals_of_two_groups_cover_their_difference_as_often_as_they_say() -> None:
    rng = np.random.default_rng(3)
    draws, covered = 150, 0
    for _ in range(draws):
        found = unpaired_difference(rng.lognormal(0.0, 0.5, 70), rng.normal(1.0, 0.2, 40))
        covered += found.low <= math.exp(0.125) - 1.0 <= found.high
    assert 0.89 <= covered / draws <= 0.995


def test_an_interval_of_a_group_of_one_is_not_known_and_one_of_equal_values_has_no_width() -> None:
    found = unpaired_difference(np.array([1.0]), np.array([0.0, 0.5]))
    assert (found.value, math.isnan(found.low), math.isnan(found.high)) == (0.75, True, True)
    found = unpaired_difference(np.full(5, 0.7), np.full(9, 0.2))
    assert (found.low, found.high) == (pytest.approx(0.5), pytest.approx(0.5))


def test_a_difference_of_shares_has_newcombes_interval() -> None:
    """56 of 70 and 48 of 80: his own example (1998, table II, method 10)."""
    found = score_difference(np.repeat([1.0, 0.0], (56, 14)), np.repeat([1.0, 0.0], (48, 32)))
    assert (found.value, found.low, found.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)
    answered = score_difference(np.ones(100), np.ones(50))
    assert answered.low < -0.01 < answered.value < 0.01 < answered.high
    mixed = np.array([0.2, 0.5, 0.9, 0.4])
    assert score_difference(mixed, mixed[:3]) == unpaired_difference(mixed, mixed[:3])


def test_a_difference_that_two_groups_tell_apart_is_found_with_the_power_that_is_said() -> None:
    rng = np.random.default_rng(4)
    one, other = rng.normal(0.0, 1.0, (2000, 80)), rng.normal(0.0, 2.0, (2000, 120))
    apart = detectable_between(one[0], other[0])
    exact = (1.959964 + 0.841621) * math.sqrt(1 / 80 + 4 / 120)
    assert apart == pytest.approx(exact, rel=0.15)
    error = np.sqrt(one.var(axis=1, ddof=1) / 80 + other.var(axis=1, ddof=1) / 120)
    found = np.abs(other.mean(axis=1) + exact - one.mean(axis=1)) > 1.959964 * error
    assert found.mean() == pytest.approx(0.8, abs=0.03)
    assert detectable_between(np.ones(5), np.ones(5)) is None
    assert detectable_between(np.ones(1), np.arange(5.0)) is None


def test_an_interval_of_equal_values_has_no_width_and_one_of_equal_answers_has() -> None:
    same = np.full(50, 0.7)
    assert (bca_mean(same).low, bca_mean(same).high) == (0.7, 0.7)
    found = paired_difference(same, same)
    assert (found.low, found.high) == (-0.06, 0.06)  # 3 in 50
    lost = paired_difference(np.zeros(30), np.ones(30))
    assert (lost.value, lost.low, lost.high) == (-1.0, -1.0, pytest.approx(-0.9))
    assert mean_score(np.ones(5)).low == pytest.approx(0.5655, abs=1e-4)  # Wilson: 5 / (5 + 1.96^2)
    with pytest.raises(ValueError, match="at least one"):
        bca_mean(np.array([]))


def test_a_resample_without_a_value_is_not_left_out_quietly() -> None:
    found = resampled(lambda rows: 1.0 if 0 in rows else math.nan, 10)  # in about a third of resamples
    assert found.value == 1.0
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_large_logs_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hypotheses, "AT_A_TIME", 50_000)  # numbers, 0.4 MB; all at once they are 13 MB
    values = np.random.default_rng(13).lognormal(size=2000)
    tracemalloc.start()
    assert unpaired_permutation(values, values + 0.5, rounds=399) < 0.05
    assert paired_permutation(values - values.mean(), rounds=399) > 0.05
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 5 << 20
    many = np.tile(values, 25)  # the jackknife of so many would be 2.5e9 numbers
    found = bca_mean(many, rounds=99)
    assert found.low < float(many.mean()) < found.high


def test_ratios_are_of_sums_and_undefined_without_a_base() -> None:
    assert ratio(np.array([1.0, 3.0]), np.array([2.0, 6.0])).value == 0.5
    assert math.isnan(ratio(np.array([1.0]), np.array([0.0])).value)
    found = resampled(lambda rows: float(rows.mean()), 101)
    assert found.value == 50.0
    assert found.low < 50.0 < found.high


def test_the_permutation_test_is_mcnemars_on_right_and_wrong() -> None:
    # Eight prompts changed, all to the better: 2 of the 2^8 sign patterns are as far out.
    assert paired_permutation(np.array([1.0] * 8 + [0.0] * 20)) == pytest.approx(2 / 2**8)
    assert paired_permutation(np.zeros(10)) == 1.0


def test_the_permutation_test_counts_all_signs_where_there_are_few() -> None:
    # Sums of +-1 +-2 +-3: 6 is reached with all plus, and -6 with all minus: 2 of 8.
    assert paired_permutation(np.array([1.0, 2.0, 3.0])) == pytest.approx(2 / 8)
    # Groups {1, 2} and {3, 4}: of the six divisions two are as far apart.
    assert unpaired_permutation(np.array([1.0, 2.0]), np.array([3.0, 4.0])) == pytest.approx(2 / 6)


def test_corrections_against_hand_computed_ones() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    # Ranked 0.01*3/1, 0.03*3/2, 0.04*3/3, each at most the next one's.
    assert corrected([0.01, 0.04, 0.03], "benjamini-hochberg") == pytest.approx([0.03, 0.04, 0.04])
    assert corrected([]) == []


def test_what_is_no_worse_is_shown_and_what_may_be_is_not() -> None:
    rng = np.random.default_rng(3)
    many, few = rng.choice([-1.0, 0.0, 1.0], 4000, p=[0.02, 0.96, 0.02]), rng.choice([-1.0, 0.0, 1.0], 60)
    assert equivalence(many, 0.02).equivalent
    assert not equivalence(few, 0.02).no_worse
    assert not equivalence(many - 0.05, 0.02).no_worse
    assert equivalence(many + 0.05, 0.02).no_worse
    assert not equivalence(many + 0.05, 0.02).equivalent
    # No change in 149 prompts is a chance of 0.98^149 = 0.0493 where 2% would change; in 148, of 0.0503.
    assert equivalence(np.zeros(149), 0.02).no_worse
    assert not equivalence(np.zeros(148), 0.02).no_worse
    with pytest.raises(ValueError, match="above 0"):
        equivalence(many, 0.0)


def lost(losses: int, prompts: int, gains: int = 0) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Differences of so many prompts."""
    return np.array([-1.0] * losses + [1.0] * gains + [0.0] * (prompts - losses - gains))


def test_few_losses_are_no_proof_that_there_are_few() -> None:
    # Without a gain, losses are binomial: 0.98^149, and that with 149 * 0.02 * 0.98^148.
    assert equivalence(lost(0, 149), 0.02).p_worse == pytest.approx(0.98**149)
    assert equivalence(lost(1, 149), 0.02).p_worse == pytest.approx(0.98**149 + 149 * 0.02 * 0.98**148)
    assert equivalence(lost(6, 300), 0.05).p_worse == pytest.approx(binom.cdf(6, 300, 0.05))
    for prompts in (149, 200, 300):
        found = [equivalence(lost(losses, prompts), 0.02).p_worse for losses in range(20)]
        assert found == sorted(found)
    assert equivalence(-lost(1, 149), 0.02).p_better == equivalence(lost(1, 149), 0.02).p_worse


@pytest.mark.parametrize("prompts", [149, 200, 300])
@pytest.mark.parametrize("gained", [0.0, 0.01, 0.05])
def test_a_loss_of_the_margin_is_found_no_worse_in_five_of_a_hundred_at_most(prompts: int, gained: float) -> None:
    margin, alarms = 0.02, 0.0
    for gains in range(int(binom.ppf(1 - 1e-4, prompts, gained)) + 1):
        others, share = prompts - gains, (gained + margin) / (1 - gained)
        # By the chance of each outcome, and not by drawing: as long as a loss more is still "no worse".
        for losses in range(others):
            if not equivalence(lost(losses, prompts, gains), margin).no_worse:
                break
            alarms += binom.pmf(gains, prompts, gained) * binom.pmf(losses, others, share)
    assert alarms <= 0.05


def test_two_one_sided_tests_against_the_t_distribution() -> None:
    # Mean 0.01, standard deviation 0.1, n 100: t = (0.01 + 0.03) / 0.01 = 4 on 99 degrees; upper tail 0.0000617.
    base = np.tile([-1.0, 1.0], 50)
    values = 0.01 + base * 0.1 * math.sqrt(99 / 100)
    found = equivalence(values, 0.03)
    assert found.p_worse == pytest.approx(6.1e-5, rel=0.05)
    assert found.p_better == pytest.approx(0.0241, rel=0.02)  # t = 2


def test_power_against_the_textbook() -> None:
    # (1.96 + 0.8416)^2 = 7.849: half a standard deviation takes 32 pairs, and 32 pairs see about half of one.
    assert prompts_needed(0.5, 1.0) == 32
    assert detectable(32, 1.0) == pytest.approx(0.495, abs=0.001)
    assert "tell 2.0 points apart" in statement(1766, 0.3)


def test_power_is_what_happens() -> None:
    rng = np.random.default_rng(4)
    count = prompts_needed(0.1, 0.5)
    found = sum(paired_permutation(rng.normal(0.1, 0.5, count), rounds=399) < 0.05 for _ in range(200))
    assert 0.70 <= found / 200 <= 0.90


def test_the_confidence_sequence_holds_at_every_time_at_once() -> None:
    rng = np.random.default_rng(5)
    missed = 0
    for _ in range(200):
        sequence = ConfidenceSequence(-1.0, 1.0)
        ever = False
        for value in rng.choice([-1.0, 0.0, 1.0], 300, p=[0.1, 0.8, 0.1]):
            interval = sequence.add([float(value)])
            ever = ever or not interval.low <= 0.0 <= interval.high
        missed += ever
    assert missed / 200 <= 0.05


def test_the_confidence_sequence_finds_a_planted_loss_and_refuses_what_breaks_it() -> None:
    rng = np.random.default_rng(6)
    sequence = ConfidenceSequence(-1.0, 1.0)
    interval = sequence.add(float(v) for v in rng.choice([-1.0, 0.0], 800, p=[0.15, 0.85]))
    assert verdict(interval) == "worse"
    assert verdict(interval, margin=0.5) == "no worse"
    assert interval.low < -0.15 < interval.high
    assert verdict(ConfidenceSequence(-1.0, 1.0).add([0.0])) == "undecided"
    with pytest.raises(ValueError, match="within"):
        sequence.add([1.5])
    with pytest.raises(ValueError, match="below"):
        ConfidenceSequence(1.0, 1.0)


def curve(costs: list[float], qualities: list[float], prompts: int = 40) -> Curve:
    """Settings that cost and answer the same on every prompt."""
    return Curve(np.tile(np.array(costs)[:, None], prompts), np.tile(np.array(qualities)[:, None], prompts))


def test_curves_are_read_along_straight_lines() -> None:
    found = curve([0.2, 0.6, 1.0], [0.5, 0.8, 0.9])
    assert found.quality_at(0.4).value == pytest.approx(0.65)
    assert found.cost_at(np.full(40, 0.65)).value == pytest.approx(0.4)
    assert math.isnan(found.quality_at(0.1).value)
    assert str(found.quality_at(0.1)) == "-"
    assert str(found.cost_at(np.full(40, 0.95))) == "not reached [not reached, not reached]"


def test_the_cost_of_anothers_quality_is_sought_on_the_same_prompts() -> None:
    """What is as good as the other on every prompt has its quality at one cost, however the prompts are drawn."""
    right = (np.arange(40) % 3 > 0).astype(np.float64)
    cheap, dear = np.zeros(40), right
    found = Curve(np.array([np.full(40, 0.2), np.full(40, 0.7)]), np.array([cheap, dear]))
    assert (found.cost_at(right).low, found.cost_at(right).high) == pytest.approx((0.7, 0.7))
    constant = found.cost_at(np.full(40, right.mean()))
    assert constant.low < 0.7
    assert math.isinf(constant.high)  # resamples in which fewer are right never have it
    assert str(constant).endswith(", not reached]")


def test_the_area_is_half_for_a_coin_and_hand_computed_for_a_bend() -> None:
    flat = np.ones(40)
    weak, strong = (0.2 * flat, 0.5 * flat), (1.0 * flat, 0.9 * flat)
    assert curve([0.2, 1.0], [0.5, 0.9]).recovered(weak, strong).value == pytest.approx(0.5)
    # At half the way in cost, three quarters of the gap: (0 + 0.75) / 4 + (0.75 + 1) / 4.
    assert curve([0.6], [0.8]).recovered(weak, strong).value == pytest.approx(0.625)
    assert math.isnan(curve([0.6], [0.8]).recovered(strong, weak).value)
    # A setting below the cheap end and better begins where that ends: (0.5 + 1) / 2.
    assert curve([0.1], [0.7]).recovered(weak, strong).value == pytest.approx(0.75)


def test_a_setting_dearer_than_the_strong_end_takes_nothing_from_the_gap() -> None:
    flat = np.ones(40)
    weak, strong = (0.2 * flat, 0.5 * flat), (1.0 * flat, 0.9 * flat)
    assert curve([0.6, 1.4], [0.8, 0.1]).recovered(weak, strong).value == pytest.approx(0.625)


def test_a_lucky_dear_setting_promises_nothing() -> None:
    assert curve([0.2, 0.4, 0.6], [0.5, 0.9, 0.7]).quality_at(0.4).value == pytest.approx(0.8)


def test_curves_of_unlike_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="alike"):
        Curve(np.ones((1, 2)), np.ones((2, 2)))
