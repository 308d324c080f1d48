"""Two experiments side by side, and reports: what must be flagged, and what must not."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest

from experiments.grid.cells import Cell, Facts, Record
from experiments.grid.spec import DatasetChoice, ExperimentSpec, LoadChoice
from experiments.grid.store import Saved, Store
from experiments.reports.comparing import OTHER_DATA, Comparison, compare
from experiments.reports.data import make_report
from experiments.reports.html import front, to_html
from experiments.reports.svg import Axes, Mark, Series, chart
from experiments.reports.text import to_json, to_markdown
from experiments.stats.intervals import Interval
from experiments.stats.power import prompts_needed
from tests.experiments.grid_runs import made_cell, save_made
from tests.experiments.pages import unclosed
from turnout.errors import TurnoutError

Made = npt.NDArray[np.float64]
Answers = dict[str, list[Record]]


class Held(Store):
    """Experiments in memory: two that have the same ways of answering the same prompts.

    Args:
        then: records by way.
        now: the same.
    """

    def __init__(self, then: dict[str, list[Record]], now: dict[str, list[Record]]) -> None:
        super().__init__(Path("nowhere"))
        self._held = {made_cell(way, run): each for run, ways in enumerate((then, now)) for way, each in ways.items()}
        made = {"methods": [{"name": "plain"}], "datasets": [{"path": "made.jsonl", "scorer": {"kind": "exact"}}]}
        spec, cells = ExperimentSpec.model_validate({"name": "made", **made}), list(self._held)
        self.then, self.now = (Saved(spec, tuple(cells[at : at + len(then)]), {}) for at in (0, len(then)))

    def state(self, cell: Cell) -> Literal["done"]:
        return "done"

    def facts(self, cell: Cell) -> Facts:
        return Facts()

    def records(self, cell: Cell) -> list[Record]:
        return self._held[cell]

    def compared(self) -> Comparison:
        return compare(self.then, self.now, self)


def answered(scores: Made, costs: Made) -> list[Record]:
    """Records with these scores and costs: two meters that go together, as they do."""
    rows = zip(scores.tolist(), costs.tolist(), strict=True)
    return [Record(f"p{n}", score, "x", 8, 8, cost, 10.0 * cost) for n, (score, cost) in enumerate(rows)]


def twice(rng: np.random.Generator, ways: int = 2, prompts: int = 60) -> Held:
    """Ways answered twice, nothing changed: prompts of their own difficulty and length, and chance in both."""
    runs: tuple[Answers, Answers] = {}, {}
    for way in range(ways):
        chance, length = rng.uniform(0.2, 0.95, prompts), rng.lognormal(0.0, 1.0, prompts)
        for run in runs:
            scores = (rng.random(prompts) < chance).astype(float)
            run[f"way {way}"] = answered(scores, length * rng.lognormal(0.0, 0.3, prompts))
    return Held(*runs)


def alarms(seed: int, runs: int = 200, **size: int) -> tuple[float, float]:
    """Shares of A/A runs with a regression, and with any change named."""
    rng = np.random.default_rng(seed)
    found = [twice(rng, **size).compared() for _ in range(runs)]
    named = [any(change.worse or change.better for change in each.changes) for each in found]
    return float(np.mean([bool(each.regressions) for each in found])), float(np.mean(named))


def test_nothing_changed_and_nothing_is_flagged_in_two_hundred_runs() -> None:
    assert alarms(seed=7)[0] <= 0.05


@pytest.mark.exactness
def test_two_hundred_runs_are_not_a_lucky_draw() -> None:
    """Ten times two hundred, of more ways and prompts: none has more than 5%, nor do changes named either way."""
    drawn = [alarms(seed, ways=4, prompts=100) for seed in range(10)]
    assert max(worse for worse, _ in drawn) <= 0.05
    assert float(np.mean([named for _, named in drawn])) <= 0.05


def test_too_many_alarms_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the correction over all figures, two hundred runs have more than their 5%."""
    monkeypatch.setattr("experiments.reports.comparing.corrected", lambda p_values: p_values)
    assert alarms(seed=7, runs=100)[0] > 0.05


def changed(seed: int, prompts: int, lost: float = 0.03, ways: int = 3, moved: float = 0.04) -> Held:
    """Ways of which some answers changed, as often to the better as to the worse; the last lost points beside."""
    rng = np.random.default_rng(seed)
    cost = rng.lognormal(0.0, 1.0, prompts)
    runs: tuple[Answers, Answers] = {}, {}
    for way in range(ways):
        before = (rng.random(prompts) < 0.7).astype(float)
        after = np.where(rng.random(prompts) < moved, (rng.random(prompts) < 0.7).astype(float), before)
        if way == ways - 1:
            after[rng.choice(np.flatnonzero(after), round(lost * prompts), replace=False)] = 0.0
        for run, scores in zip(runs, (before, after), strict=True):
            run["bad" if way == ways - 1 else f"way {way}"] = answered(scores, cost)
    return Held(*runs)


def test_a_planted_loss_of_three_points_is_flagged_by_any_seed() -> None:
    """1500 prompts: it says itself that they tell less than three points apart."""
    for seed in range(4):
        found = changed(seed, prompts=1500).compared()
        assert [(each.way.rpartition(": ")[2], each.measure) for each in found.regressions] == [("bad", "quality")]
        assert found.regressions[0].change.low <= -0.03 <= found.regressions[0].change.high
        points = re.search(r"1500 prompts tell ([0-9.]+) points apart \(power 80%, 9 comparisons\)", found.power[0])
        assert points is not None
        assert float(points[1]) < 3.0


@pytest.mark.exactness
def test_the_power_that_is_stated_is_what_happens() -> None:
    """At the number of prompts that three points take, they are flagged in about 80% of runs, and at a third in few."""
    spread = math.sqrt(0.03 + 0.04 * 2 * 0.7 * 0.3)
    enough = prompts_needed(0.03, spread, 0.05 / 9)
    found = [bool(changed(seed, enough).compared().regressions) for seed in range(60)]
    assert 0.65 <= float(np.mean(found)) <= 0.95
    few = [bool(changed(seed, enough // 3).compared().regressions) for seed in range(60)]
    assert float(np.mean(few)) < 0.5


def test_likelihoods_have_no_points_and_no_margin(tmp_path: Path) -> None:
    """Nats have no bounds: neither points, nor a margin of quality, nor 3 in n."""
    held = changed(0, prompts=40)
    nats = DatasetChoice.model_validate({"path": "made.jsonl", "scorer": {"kind": "likelihood"}})
    store, cells = Store(tmp_path), [replace(cell, dataset=nats) for cell in held.now.cells[:2]]
    for cell, shift in zip(cells, (0.0, 0.3), strict=True):
        scores = -np.linspace(1.0, 4.0, 40) - shift
        store.save_chunk(cell, 0, answered(scores, np.ones(40)), Facts())
        store.finish(cell, Facts())
    spec = held.now.spec.model_copy(update={"baseline": "way 0", "name": "nats"})
    store.save(spec, cells, {})
    report = make_report(store.load("nats"), store)
    assert [line.verdict for line in report.lines] == ["", "worse"]
    found = report.lines[1].difference
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((-0.3, -0.3, -0.3))
    assert "nats a token apart" in report.power[0]
    store.save(spec.model_copy(update={"name": "same"}), [cells[0], replace(cells[0], label="twin")], {})
    same = make_report(store.load("same"), store).lines[1]
    assert (same.verdict, same.difference) == ("not told apart", Interval(0.0, 0.0, 0.0))
    [line] = compare(store.load("same"), store.load("same"), store).power
    assert "nats a token apart" in line


def test_what_is_tested_of_a_cost_is_what_is_judged(tmp_path: Path) -> None:
    """Most prompts are 10% cheaper and five long ones twice as dear: the bill rose, and no test is sure of it."""
    store, scores = Store(tmp_path), np.ones(100)
    costs = np.where(np.arange(100) < 95, 8.0, 64.0)
    save_made(store, "then", {"plain": scores}, run=0, paper=costs)
    save_made(store, "now", {"plain": scores}, run=1, paper=np.where(costs == 8.0, 7.2, 128.0))
    for one, other in (("then", "now"), ("now", "then")):
        found = compare(store.load(one), store.load(other), store)
        [paper] = [change for change in found.changes if change.measure == "paper"]
        assert (paper.change.value > 1.0) == (one == "then")
        assert (paper.worse, paper.better) == (False, False)


def test_a_way_that_died_is_lost_and_no_change_hides_it(tmp_path: Path) -> None:
    store, scores = Store(tmp_path), np.ones(30)
    for name, run in (("then", 0), ("now", 1)):
        save_made(store, name, {"plain": scores, "dead": scores}, run=run)
    cell = store.load("now").cells[1]
    shutil.rmtree(store.root / "cells" / cell.address[:2] / cell.address)
    store.fail(cell, "it broke")
    found = compare(store.load("then"), store.load("now"), store)
    assert {name.rpartition(": ")[2]: why for name, why in found.lost.items()} == {"dead": "it broke"}
    assert found.only_then == []


@pytest.mark.parametrize("number", [1, 60])
def test_answers_that_have_no_score_any_more_are_no_match(number: int) -> None:
    held = twice(np.random.default_rng(0))
    records = held.records(next(cell for cell in held.now.cells if cell.label == "way 1"))
    for record in records[:number]:
        record.score, record.note = None, "the judge is away"
    found = held.compared()
    assert {way.rpartition(" ")[2]: why for way, why in found.lost.items()} == {
        "1": f"{number} prompts have no score, p0 for one, that had one before"
    }


def loaded(store: Store, name: str, first_s: float, refused: int = 0) -> None:
    """An experiment of one way under open-loop load: answers of one length, some of them refused."""
    load = LoadChoice(rate=5.0)
    cell = replace(made_cell("plain"), load=load, depends={"run": name})
    rng = np.random.default_rng(3)
    records = [
        Record(f"p{n % 20}#{n}", 1.0, "x", 8, 8, 8.0, 80.0, 80.0, 1.0, first_s * rng.uniform(0.8, 1.2))
        for n in range(60)
    ]
    for record in records[:refused]:
        record.score, record.error, record.paper, record.ttft_s, record.wall_s = 0.0, "no room", 0.0, 0.0, 0.0
    facts = Facts(load={"requests": len(records)})
    store.save_chunk(cell, 0, records, facts)
    store.finish(cell, facts)
    spec = {"methods": [{"name": "plain"}], "datasets": [{"path": "made.jsonl", "scorer": {"kind": "exact"}}]}
    store.save(ExperimentSpec.model_validate({"name": name, "loads": [load.model_dump()], **spec}), [cell], {})


def test_first_tokens_that_come_twice_as_late_under_load_are_a_regression(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for name, first_s, refused in (("then", 0.2, 0), ("late", 0.4, 0), ("full", 0.2, 20)):
        loaded(store, name, first_s, refused)
    assert compare(store.load("then"), store.load("late"), store).regressions == []
    [later] = compare(store.load("then"), store.load("late"), store, time_tolerance=0.25).regressions
    assert (later.measure, later.prompts) == ("first token", 60)
    assert later.way == "made, pool, poisson 5/s for 10 s: plain"
    assert later.change.value == pytest.approx(2.0, abs=0.1)
    # Those refused count as wrong, and make nothing cheaper or faster.
    full = compare(store.load("then"), store.load("full"), store, time_tolerance=0.25)
    assert [(each.measure, each.prompts) for each in full.changes if each.worse or each.better] == [("quality", 60)]
    assert {each.prompts for each in full.changes} == {40, 60}


def test_a_cost_that_grew_is_a_regression_and_ways_of_one_side_are_named(tmp_path: Path) -> None:
    store, scores = Store(tmp_path), np.ones(30)
    save_made(store, "then", {"plain": scores, "old": scores}, run=0)
    save_made(store, "now", {"plain": scores, "new": scores}, run=1, paper=9.0)
    found = compare(store.load("then"), store.load("now"), store, time_tolerance=0.25)
    [dearer] = found.regressions
    assert dearer.measure == "paper"
    assert dearer.change.value == pytest.approx(9 / 8)
    assert [name.rpartition(": ")[2] for name in (*found.only_then, *found.only_now)] == ["old", "new"]
    assert {change.measure for change in found.changes} == {"quality", "paper", "flops", "time"}


def test_a_report_says_who_is_worse_and_who_is_no_worse(tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    base = (rng.random(1500) < 0.8).astype(float)
    worse = base.copy()
    worse[np.flatnonzero(base)[:90]] = 0.0
    store = Store(tmp_path)
    save_made(store, "made", {"plain": base, "same": base, "worse": worse}, run=0)
    report = make_report(store.load("made"), store)
    assert [line.verdict for line in report.lines] == ["", "no worse", "worse"]
    assert report.lines[1].difference is not None
    assert report.lines[1].difference.high == pytest.approx(3 / 1500)
    assert "1500 prompts tell" in report.power[0]
    assert report.energy.startswith("this machine has no meter")
    page = to_html(report)
    assert 'class="worse"' in page
    assert unclosed(page) == []
    assert "| worse |" in to_markdown(report)
    assert json.loads(to_json(report))["lines"][0]["joules_per_token"] is None


def test_other_prompts_are_named_and_never_paired() -> None:
    """A row more at the top of a file gives each row's number to another prompt."""
    held = changed(0, prompts=200, lost=0.2)
    then, now = held.then, held.now
    moved = [replace(cell, depends={**cell.depends, "dataset": "other"}) for cell in now.cells[-1:]]
    held._held.update({cell: held.records(now.cells[-1]) for cell in moved})
    held.now = Saved(now.spec, (*now.cells[:-1], *moved), {})
    assert compare(then, now, held).regressions
    found = held.compared()
    assert not found.regressions
    assert {change.way.rpartition(": ")[2] for change in found.changes} == {"way 0", "way 1"}
    assert [(way.rpartition(": ")[2], why) for way, why in found.lost.items()] == [("bad", OTHER_DATA)]


def test_what_a_stop_rule_ended_has_the_rules_interval_and_one_seed_does_not_speak_for_all(tmp_path: Path) -> None:
    scores, store = np.ones(40), Store(tmp_path)
    save_made(store, "made", {"plain": scores, "a": scores * 0.5}, run=0)
    cell = store.load("made").cells[1]
    ended = Facts(stopped="worse after 40 prompts (x), confidence sequence", sequence=[-0.9, -0.2])
    store.finish(cell, ended)
    line = make_report(store.load("made"), store).lines[1]
    assert line.difference == Interval(-0.5, -0.9, -0.2)
    assert line.verdict == "worse"
    other = replace(cell, seed=cell.seed + 1)
    store.save_chunk(other, 0, store.records(cell), Facts())
    store.finish(other, Facts(sequence=[-0.7, 0.3]))
    saved = store.load("made")
    store.save(saved.spec, [*saved.cells, other], {})
    line = make_report(store.load("made"), store).lines[1]
    assert line.difference == Interval(-0.5, -0.9, 0.3)
    assert (line.verdict, line.p) == ("not told apart", None)


def test_where_there_is_nothing_to_lose_nothing_is_called_no_worse(tmp_path: Path) -> None:
    """Three of a hundred right, where five are the margin: a way that lost them all would be within it."""
    scores, store = np.zeros(400), Store(tmp_path)
    scores[:12] = 1.0
    save_made(store, "made", {"plain": scores, "same": scores}, run=0)
    saved = store.load("made")
    store.save(saved.spec.model_copy(update={"margin": 0.05}), list(saved.cells), {})
    report = make_report(store.load("made"), store)
    assert report.lines[1].verdict == "not told apart"
    assert report.power[0].endswith("plain has a quality of 0.030: no loss of 0.05 could show")


def test_no_worse_is_said_of_all_ways_together_and_never_beside_a_stop_rule(tmp_path: Path) -> None:
    """149 equal prompts show it of one way (0.98^149 = 0.049), not of two; what stopped has its rule's verdict."""
    same, store = np.ones(149), Store(tmp_path)
    save_made(store, "one", {"plain": same, "a": same}, run=0)
    assert make_report(store.load("one"), store).lines[1].verdict == "no worse"
    save_made(store, "two", {"plain": same, "a": same, "b": same}, run=0)
    report = make_report(store.load("two"), store)
    assert [line.verdict for line in report.lines[1:]] == ["not told apart"] * 2
    assert report.lines[0].quality.low < 0.98 < report.lines[0].quality.high
    store.finish(store.load("two").cells[1], Facts(stopped="worse after 149 prompts (x), confidence sequence"))
    line = make_report(store.load("two"), store).lines[1]
    assert (line.verdict, line.p) == ("worse", None)


def test_answers_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    store = Store(tmp_path)
    save_made(store, "made", {"plain": np.ones(2)}, run=0)
    [cell] = store.load("made").cells
    evil = "</script><script>alert(1)</script>"
    store.save_chunk(cell, 0, [Record(evil, 1.0, evil, 1, pieces=[(evil, "decoded", evil)], note=evil)], Facts())
    assert "<script>alert" not in to_html(make_report(store.load("made"), store))


def test_the_front_is_what_nobody_beats_in_both() -> None:
    marks = [Mark(0.1, 0.5), Mark(0.3, 0.4), Mark(0.5, 0.9), Mark(1.0, 0.9), Mark(0.1, 0.2)]
    assert front(marks) == [Mark(0.1, 0.5), Mark(0.5, 0.9)]


def test_charts_leave_out_what_cannot_be_drawn() -> None:
    axes = Axes("x", "y", logarithmic=True)
    assert chart("none", axes, [Series("a", [Mark(1, 0.0), Mark(float("nan"), 1.0)])]) == ""
    svg = chart("some & one", axes, [Series("a<b", [Mark(1, 0.01), Mark(2, 10.0)], joined=True)])
    assert svg.count("<circle") == 3
    assert "some &amp; one" in svg
    assert "a&lt;b" in svg


def test_a_comparison_of_nothing_in_common_has_no_changes(tmp_path: Path) -> None:
    store = Store(tmp_path)
    save_made(store, "then", {"one": np.ones(5)}, run=0)
    save_made(store, "now", {"other": np.ones(5)}, run=1)
    assert compare(store.load("then"), store.load("now"), store).changes == []
    with pytest.raises(TurnoutError):
        store.load("never")
