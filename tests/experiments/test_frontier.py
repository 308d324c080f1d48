"""Quality against cost: areas by hand, an oracle that is one, and coins that gain nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments.frontier.figures import figures, kept_at
from experiments.frontier.page import plot, to_markdown
from experiments.frontier.prompts import LARGE, METERS, SMALL, Answers, Prompts
from experiments.grid.planning import make_plan
from experiments.grid.spec import read_spec
from experiments.grid.store import Store
from training.router_measures import recovered

COUNT = 400
RNG = np.random.default_rng(5)
RIGHT = {SMALL: (RNG.random(COUNT) < 0.5).astype(float), LARGE: (RNG.random(COUNT) < 0.9).astype(float)}


def answers(scores: np.ndarray, cost: np.ndarray, by_large: np.ndarray) -> Answers:
    return Answers(scores, dict.fromkeys(METERS, cost), 10.0 * by_large, np.full(len(scores), 10.0))


def routed(to_large: np.ndarray) -> Answers:
    """Each prompt answered by one of the two; the small one costs 1, the large one 10."""
    scores = np.where(to_large, RIGHT[LARGE], RIGHT[SMALL])
    return answers(scores, np.where(to_large, 10.0, 1.0), to_large.astype(float))


def prompts(**more: tuple[str, Answers]) -> Prompts:
    """The two models and these ways: (family, answers) by label."""
    ways = {SMALL: routed(np.zeros(COUNT, bool)), LARGE: routed(np.ones(COUNT, bool))}
    families = {SMALL: "plain", LARGE: "plain"}
    for label, (family, given) in more.items():
        ways[label], families[label] = given, family
    kinds = ["sums" if n % 2 else "lists" for n in range(COUNT)]
    return Prompts(kinds, ways, families)


def sent(order: np.ndarray, share: float) -> Answers:
    """The first of an order go to the large model."""
    to_large = np.zeros(COUNT, bool)
    to_large[order[: round(share * COUNT)]] = True
    return routed(to_large)


def test_the_oracle_has_all_of_itself_and_coins_have_nothing() -> None:
    best = np.argsort(-(RIGHT[LARGE] - RIGHT[SMALL]), kind="stable")
    coins = RNG.permutation(COUNT)
    shares = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    found = figures(
        prompts(
            **{f"best {share}": ("best", sent(best, share)) for share in shares},
            **{f"coins {share}": ("coins", sent(coins, share)) for share in shares},
        )
    )
    by_name = {family.name: family for family in found.families}
    assert by_name["best"].of_oracle["paper"].value == pytest.approx(1.0, abs=0.05)
    assert by_name["coins"].of_oracle["paper"].low < 0.15
    assert by_name["best"].area["paper"].low > 0.05
    above = {point.label: point.above["paper"] for point in found.points}
    assert above[SMALL].value == above[LARGE].value == 0.0
    assert above["best 0.4"].low > 0.1
    assert above["coins 0.4"].low < 0.05


def test_an_area_by_hand() -> None:
    """One prompt of four gains; the setting that sends it alone is a quarter of the way up in cost."""
    small, large = np.array([1.0, 1.0, 1.0, 0.0] * 100), np.ones(400)
    gains = large > small
    ways = {
        SMALL: answers(small, np.full(400, 1.0), np.zeros(400)),
        LARGE: answers(large, np.full(400, 5.0), np.ones(400)),
        "a": answers(np.where(gains, large, small), np.where(gains, 5.0, 1.0), gains.astype(float)),
        "b": answers(large, np.full(400, 4.0), np.ones(400)),
    }
    made = Prompts(["x"] * 400, ways, {SMALL: "plain", LARGE: "plain", "a": "f", "b": "f"})
    [family] = figures(made).families
    # Quality 0.75 at cost 1, 1 from cost 2 on: above the line by a triangle of base 1 and height 3/16.
    assert family.area["paper"].value == pytest.approx(0.5 * 3 / 16, abs=2e-3)
    assert family.of_oracle["paper"].value == pytest.approx(1.0, abs=0.02)
    point = next(each for each in figures(made).points if each.label == "a")
    assert point.above["paper"].value == pytest.approx(3 / 16)
    assert (point.share, point.costs["paper"].value) == (0.25, pytest.approx(0.4))
    assert kept_at(made, "f", 0.25).value == pytest.approx(1.0)
    assert kept_at(made, "f", 0.125).value == pytest.approx(0.875)


def test_what_no_setting_reaches_is_said() -> None:
    few = prompts(a=("f", sent(np.arange(COUNT), 0.1)), b=("f", sent(np.arange(COUNT), 0.2)))
    assert np.isnan(kept_at(few, "f", 0.5).value)


def test_the_oracle_is_the_routers() -> None:
    from experiments.frontier.figures import _routed

    here = _routed(prompts(), "flops")
    assert recovered(here) == pytest.approx(0.0, abs=0.3)  # no predictions: the order of the prompts
    x, added = here.oracle
    assert (x[0], added[0]) == (0.0, 0.0)
    assert x[-1] == pytest.approx(1.0)
    assert max(added) > here.gain.mean()


def test_a_page_and_a_picture(tmp_path: Path) -> None:
    made = prompts(**{f"s{share}": ("route x", sent(np.arange(COUNT), share)) for share in (0.3, 0.6)})
    found = figures(made)
    page = to_markdown(found, "a machine", {0.25: kept_at(made, "route x", 0.25), 0.9: kept_at(made, "route x", 0.9)})
    assert "| route x | 2 | " in page
    assert "| 90% | not reached |" in page
    assert "| lists | 200 |" in page
    plot(found, tmp_path / "frontier.png")
    assert (tmp_path / "frontier.png").stat().st_size > 10_000


def test_the_shipped_experiment_can_be_planned(tmp_path: Path) -> None:
    asked = read_spec(Path("ops/experiments/frontier.yaml"))
    plan = make_plan(asked, Store(tmp_path))
    labels = {cell.label for cell in plan.cells}
    assert {SMALL, LARGE} <= labels
    assert {cell.policy for cell in plan.cells} == {"", "learned"}
    assert sum(choice.count or 0 for choice in asked.datasets) >= 1000
