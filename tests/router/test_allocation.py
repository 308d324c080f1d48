"""Allocation of samples under a budget: the card's numbers, optimality by enumeration, budgets kept."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from router.allocation import (
    Bins,
    SlidingWindow,
    allocate,
    best_of,
    falling,
    marginals,
    reward_marginals,
    right_among,
)


def value(items: list[list[float]], counts: list[int]) -> float:
    return sum(sum(item[:count]) for item, count in zip(items, counts, strict=True))


def test_the_papers_marginals():
    assert marginals(0.5, 4) == [0.5, 0.25, 0.125, 0.0625]
    assert marginals(0.1, 3) == pytest.approx([0.1, 0.09, 0.081])
    assert sum(marginals(0.3, 5)) == pytest.approx(best_of(0.3, 5))


def test_three_samples_go_to_the_first_and_the_fourth_to_the_second():
    items = [marginals(0.5, 8), marginals(0.1, 8)]
    assert allocate(items, 3) == [3, 0]
    assert allocate(items, 4) == [3, 1]


def test_hopeless_and_sure_requests_get_nothing_and_one():
    assert allocate([marginals(0.0, 8), marginals(1.0, 8)], 10) == [0, 1]
    assert allocate([marginals(0.0, 8), marginals(1.0, 8)], 10, least=1) == [1, 1]


@pytest.mark.parametrize("seed", range(20))
def test_greedy_is_as_good_as_trying_everything(seed: int):
    rng = np.random.default_rng(seed)
    most = 4
    items = [falling(sorted(rng.random(most), reverse=True)) for _ in range(4)]
    budget = int(rng.integers(0, 14))
    counts = allocate(items, budget)
    assert sum(counts) <= budget
    tried = (each for each in product(range(most + 1), repeat=4) if sum(each) <= budget)
    assert value(items, counts) == pytest.approx(max(value(items, list(each)) for each in tried))


def test_what_every_request_gets_counts_against_the_budget():
    items = [marginals(chance, 6) for chance in (0.9, 0.5, 0.01)]
    counts = allocate(items, 7, least=1)
    assert (sum(counts), counts[2]) == (7, 1)
    assert counts[1] > counts[0]


def test_falling_marginals_never_rise_or_sink_below_zero():
    assert falling([0.5, 0.6, 0.2, -0.1, 0.1]) == [0.5, 0.5, 0.2, 0.0, 0.0]


def test_chances_and_marginals_of_drawn_samples_are_means_over_all_ways_to_pick():
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0]
    for count in range(1, 6):
        picks = list(combinations(rewards, count))
        assert right_among(2, 5, count) == pytest.approx(sum(max(each) for each in picks) / len(picks))
    graded = [0.3, 2.0, -1.0, 0.5]
    found = reward_marginals(graded, 4)
    for count in range(1, 5):
        picks = list(combinations(graded, count))
        assert sum(found[:count]) == pytest.approx(sum(max(each) for each in picks) / len(picks))
    with pytest.raises(ValueError, match="only 4 samples"):
        reward_marginals(graded, 5)
    with pytest.raises(ValueError, match="only 4 samples"):
        right_among(2, 4, 5)


def test_marginals_of_samples_estimate_those_of_the_chance():
    rng = np.random.default_rng(0)
    found = np.mean([reward_marginals(list((rng.random(10) < 0.3) * 1.0), 4) for _ in range(4000)], axis=0)
    assert found == pytest.approx(marginals(0.3, 4), abs=0.02)


def test_bins_are_the_allocation_of_the_held_out_set():
    predicted = [0.02] * 30 + [0.3] * 40 + [0.97] * 30
    bins = Bins.solve(predicted, average=3, most=8, num_bins=10, least=1)
    given = [bins.of(each) for each in predicted]
    assert sum(given) <= 300
    assert bins.of(0.97) == 1
    assert bins.of(0.3) > 2 * bins.of(0.97)
    assert bins.of(0.02) < bins.of(0.3)
    # With one request in every bin it is the batch's own allocation.
    chances = [0.05, 0.2, 0.4, 0.6, 0.8]
    alone = Bins.solve(chances, average=3, most=8, num_bins=5)
    assert [alone.of(each) for each in chances] == allocate([marginals(each, 8) for each in chances], 15)


def test_predictions_that_are_all_alike_make_one_bin():
    bins = Bins.solve([0.4] * 20, average=3, most=8)
    assert (bins.edges, bins.samples) == ((), (3,))


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("size", [1, 7, 20])
def test_no_window_spends_more_than_its_budget(size: int, least: int):
    rng = np.random.default_rng(size)
    window = SlidingWindow(3.0, size, least)
    given = [window.give(marginals(float(chance), 8)) for chance in rng.beta(0.5, 0.5, 300)]
    assert max(sum(given[start : start + size]) for start in range(300 - size + 1)) <= 3 * size
    assert min(given) >= least
    assert sum(given) > 300 * 0.9  # it does not save the budget up either


def test_a_window_gives_more_where_more_is_to_be_had():
    rng = np.random.default_rng(3)
    chances = rng.choice([0.0, 0.25, 1.0], 2000)
    window = SlidingWindow(3.0, 50, least=1)
    given = np.array([window.give(marginals(float(chance), 8)) for chance in chances])
    assert given[chances == 0.25].mean() > 4.0
    assert given[chances == 0.0].mean() == given[chances == 1.0].mean() == 1.0


def test_a_window_keeps_back_what_later_requests_get_in_any_case():
    """Every request is worth more than all before it, and would take all there is."""
    window = SlidingWindow(3.0, 20, least=1)
    given = [window.give([float(number)] * 8) for number in range(1, 101)]
    assert max(sum(given[start : start + 20]) for start in range(81)) <= 60
    assert (given[0], max(given), min(given)) == (3, 8, 1)


def test_a_window_that_cannot_keep_its_least_is_refused():
    with pytest.raises(ValueError, match="at most average"):
        SlidingWindow(0.5, 10, least=1)


@pytest.mark.parametrize("average", [1.5, 2.0, 3.0, 4.0])
def test_oracle_is_at_least_predicted_is_better_than_uniform(average: float):
    """The direction of the paper on planted chances, which the predictions know up to noise."""
    rng = np.random.default_rng(5)
    num, most = 2000, 10
    true = rng.beta(0.4, 0.6, num)
    guess = 1 / (1 + np.exp(-(np.log(true + 1e-6) - np.log(1 - true + 1e-6) + rng.normal(0, 1, num))))
    total = int(average * num)

    def success(counts: list[int]) -> float:
        return float(np.mean([best_of(float(t), c) for t, c in zip(true, counts, strict=True)]))

    oracle = success(allocate([marginals(float(t), most) for t in true], total))
    predicted = success(allocate([marginals(float(g), most) for g in guess], total))
    low, high = (np.array([best_of(float(t), k) for t in true]).mean() for k in (int(average), -int(-average // 1)))
    uniform = low + (average - int(average)) * (high - low)
    assert oracle >= predicted > uniform + 0.01
