"""Entropy switching is judged where the large model writes a quarter and 43% of the tokens, by hand-made answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.bench_ead import Table, above_choice, between, earliest, judge, page, summarise
from benchmarks.harness import Goal
from benchmarks.retention import RETENTIONS, Spent, judged, kept_at
from benchmarks.strategies import Arm, ArmResult, Outcome
from benchmarks.switching_arms import SETTINGS, Prompts, arithmetic, expected_share, matched, mixed
from experiments.stats.intervals import Interval
from training.data.problem import Problem
from turnout.calls import TokenOut, Usage
from turnout.cost import Cost, CostReport, SpeculationMeter
from turnout.registry import get_method
from turnout.sources import ROOT
from turnout.types import TokenKind

COUNT = 1000
TOKEN = TokenOut(1, "a", "small", TokenKind.DECODED)
LOWER, HIGHER = RETENTIONS
PROBLEM = Problem("1+1?", "2", "2", 1, "arithmetic")


def outcome(right: bool, share: float) -> Outcome:
    cost = CostReport(Cost(0.5, 10.0, 1.0), Cost(1.0, 20.0, 1.0), share, 0.75 * share)
    return Outcome(right, "", (TOKEN,), Usage(1, 10, 0, {}, SpeculationMeter(), 0, cost, "x", {}, 1, 0.1, 0.2))


def arm(name: str, method: str, accuracy: float, share: float) -> ArmResult:
    """The first problems are answered rightly."""
    outcomes = tuple(outcome(place < accuracy * COUNT, share) for place in range(COUNT))
    return ArmResult(Arm(name, method), outcomes, 1.0)


def results(*points: tuple[float, float]) -> list[ArmResult]:
    """Models alone with accuracy 0.6 and 0.9; entropy switching of these (share, accuracy), random ones on the line."""
    found = [arm("small only", "plain", 0.6, 0.0), arm("large only", "plain", 0.9, 1.0)]
    for share, accuracy in points:
        found.append(arm(f"entropy at {share:g}", "entropy_adaptive", accuracy, share))
        found.append(arm(f"random for {share:g}", "random_switch", 0.6 + 0.3 * share, share))
    return found


def spent(quality: float, share: float) -> Spent:
    tokens = np.full(COUNT, 10.0)
    return Spent((np.arange(COUNT) < quality * COUNT).astype(float), share * tokens, tokens)


def test_between_two_settings_quality_lies_on_the_line_and_nothing_is_smoothed() -> None:
    settings, large = [spent(0.5, 0.0), spent(0.9, 0.3), spent(0.7, 0.5)], spent(1.0, 1.0).scores
    found = {share: kept_at(settings, large, share) for share in (0.15, 0.3, 0.4, 0.5)}
    assert {share: round(each.value, 3) for share, each in found.items()} == {0.15: 0.7, 0.3: 0.9, 0.4: 0.8, 0.5: 0.7}
    assert all(each.low < each.value < each.high for each in found.values())
    assert kept_at(settings, 0.5 * large, 0.3).value == pytest.approx(1.8)


def test_long_answers_count_by_their_tokens() -> None:
    tokens = np.array([30.0, 10.0])
    one = Spent(np.ones(2), np.array([30.0, 0.0]), tokens)
    assert one.share == 0.75
    assert kept_at([Spent(np.zeros(2), np.zeros(2), tokens), one], np.ones(2), 0.375).value == pytest.approx(0.5)


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_a_share_that_no_two_settings_bracket_is_not_guessed(share: float) -> None:
    assert np.isnan(kept_at([spent(0.5, 0.3), spent(0.9, 0.5)], np.ones(COUNT), share).value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Interval(0.95, 0.93, 0.97), "met"),
        (Interval(0.95, 0.92, 0.97), "met, but the interval holds the goal"),
        (Interval(0.92, 0.90, 0.94), "missed, but the interval holds the goal"),
        (Interval(0.90, 0.88, 0.92), "missed"),
        (Interval(0.95, float("nan"), float("nan")), "met, without an interval"),
        (Interval(float("nan"), float("nan"), float("nan")), "not measured"),
    ],
)
def test_a_verdict_says_how_sure_it_is(value: Interval, said: str) -> None:
    assert judged(value, Goal(0.93)) == f"goal at least 93.0%: {said}"


def test_both_goals_are_judged_each_at_its_own_share() -> None:
    """Good at a quarter and worse at 43%: the best point of a band would have hidden that."""
    ran = results((0.2, 0.88), (0.3, 0.88), (0.4, 0.8), (0.46, 0.8))
    lower, higher = (judge(ran, goal) for goal in RETENTIONS)
    assert lower.kept.value == pytest.approx(0.88 / 0.9)
    assert ": met." in str(lower)
    assert lower.above is not None
    assert lower.above.value == pytest.approx(0.88 - 0.675)
    assert higher.kept.value == pytest.approx(0.8 / 0.9)
    assert higher.kept.high < HIGHER.least
    assert "goal at least 96.7%: missed." in str(higher)
    assert "Fewer large tokens do better here: entropy at 0.2, 20.0% of the tokens, accuracy +0.080" in str(higher)
    assert lower.better is None


def test_figures_of_each_problem_between_two_points() -> None:
    ends = {0.0: (np.zeros(2), np.ones(2)), 0.4: (np.array([1.0, 0.0]), np.zeros(2))}
    first, second = between(ends, 0.1)
    assert (first.tolist(), second.tolist()) == ([0.25, 0.0], [0.75, 0.75])
    assert between(ends, 0.4)[0].tolist() == [1.0, 0.0]


def test_a_share_beyond_all_thresholds_is_said() -> None:
    found = judge(results((0.2, 0.88), (0.3, 0.88)), HIGHER)
    assert str(found) == (
        "- At 43% large tokens: no two thresholds with that share between them; goal at least 96.7%: not measured."
    )


def test_the_page_has_both_verdicts_for_every_setting(tmp_path: Path) -> None:
    ran = results((0.2, 0.88), (0.3, 0.88), (0.46, 0.8))
    verdicts = [judge(ran, goal) for goal in RETENTIONS]
    kinds = [Prompts(title, [PROBLEM] * COUNT, [], 160) for title in ("arithmetic", "mixed prompts")]
    lines = summarise(ran, SETTINGS["paper"])
    tables = [Table(setting, lines, verdicts, each.title) for each in kinds for setting in SETTINGS.values()]
    page(kinds, tables, {"cores": "2"}).save(tmp_path / "ead.md")
    text = (tmp_path / "ead.md").read_text()
    assert text.count("\n- At ") == len(RETENTIONS) * len(tables)
    assert text.startswith("# Entropy Adaptive Decoding on the demo pair\n\n`make bench-ead`. ")
    assert "Held-out prompts: 1000 of arithmetic; 1000 of mixed prompts." in text
    assert text.count("\n- At 25% large tokens: ") == text.count("\n- At 43% large tokens: ") == 2 * len(SETTINGS)
    assert text.count("| entropy at 0.2 | 0.880 [0.858, 0.899] | 97.8% | 20.0% | 15.0% |") == 2 * len(SETTINGS)
    assert text.endswith("![accuracy over share](ead.png)\n")
    assert (tmp_path / "ead.png").stat().st_size > 10_000
    numbers = json.loads((tmp_path / "ead.json").read_text())
    first = numbers[f"{SETTINGS['paper'].title}, mixed prompts"]["goals"]
    assert [each["goal"]["share"] for each in first] == [0.25, 0.43]
    assert first[1]["verdict"] == "goal at least 96.7%: missed"


def answered(*runs: int, share: float = 0.3) -> Outcome:
    """An answer in runs of so many tokens, the first one the small model's."""
    tokens = tuple(
        replace(TOKEN, source=("small", "large")[place % 2]) for place, run in enumerate(runs) for _ in range(run)
    )
    found = outcome(True, share)
    return replace(found, tokens=tokens, usage=replace(found.usage, completion_tokens=len(tokens)))


def switched(*outcomes: Outcome, cpu_s: float = 0.0) -> ArmResult:
    return ArmResult(Arm("entropy", "entropy_adaptive"), outcomes, 1.0, cpu_s)


@pytest.mark.parametrize(("name", "share"), [("paper", 0.25), ("paper", 0.4), ("each", 0.25), ("each", 0.75)])
def test_the_random_baseline_starts_with_the_same_model_and_has_the_same_share(name: str, share: float) -> None:
    """On answers of 37 tokens, which are over before a random start is forgotten."""
    setting = SETTINGS[name]
    adaptive = switched(*(answered(12, 12, 13, share=share) for _ in range(80)))
    found = matched(adaptive, setting)
    assert found.params["start"] == setting.params["start"] == "small"
    assert get_method("random_switch").parse(found.params)
    assert expected_share(found.params, [37] * 80) == pytest.approx(share, abs=0.02)
    longer = switched(*(answered(150) for _ in range(20)))
    assert expected_share(matched(adaptive, setting, longer).params, [150] * 20) == pytest.approx(share, abs=0.02)


def test_a_random_start_gives_short_answers_more_of_the_large_model() -> None:
    """Why the starts must be alike: on answers of 37 tokens in runs of 9 the same parameters have another share."""
    params = {"share": 0.4, "mean_run": 9.0, "min_stay": 7}
    drawn, small = (expected_share({**params, "start": start}, [37] * 400) for start in ("drawn", "small"))
    assert drawn == pytest.approx(0.4, abs=0.02)
    assert small < drawn - 0.02


def test_answers_in_which_the_minimum_stay_decides_are_counted() -> None:
    paper = SETTINGS["paper"]
    held, free, once = answered(10, 10, 10, 7), answered(10, 12, 10, 5), answered(10, 27)
    assert earliest(switched(held, held, free, once), paper) == 0.5
    assert earliest(ArmResult(Arm("r", "random_switch"), (held,), 1.0), paper) is None
    assert earliest(switched(held), SETTINGS["each"]) is None


def test_what_a_random_choice_of_models_buys_for_the_same_cost() -> None:
    small, large = arm("small only", "plain", 0.6, 0.0), arm("large only", "plain", 0.9, 1.0)
    mine = arm("entropy", "entropy_adaptive", 0.8, 0.3)
    assert above_choice(mine, small, large, (2.0, 1.0, 4.0)).mean() == pytest.approx(0.8 - 0.7)
    assert above_choice(mine, small, large, (5.0, 1.0, 4.0)).mean() == pytest.approx(0.8 - 0.9)
    assert above_choice(mine, small, large, (0.5, 1.0, 4.0)).mean() == pytest.approx(0.8 - 0.6)


def test_prompts_of_all_kinds_are_those_of_the_frontier_and_thresholds_come_from_others() -> None:
    found = mixed(0.02, 60, ROOT / "ops" / "experiments" / "frontier.yaml")
    assert len(found.asked) == pytest.approx(0.02 * 1060, abs=3)
    scored, others = ({each.prompt for each in those} for those in (found.asked, found.calibration))
    assert not scored & others
    assert len(others) >= 40
    assert found.max_tokens == 200
    numbers = arithmetic(20, 20)
    assert not {each.prompt for each in numbers.asked} & {each.prompt for each in numbers.calibration}
