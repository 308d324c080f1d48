"""Sampling as an axis of the grid: what is asked, what it is compared with, and what tuning it is worth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from experiments.grid.cells import FORMAT, Cell, Facts, Record
from experiments.grid.planning import count_cells, make_plan, ways
from experiments.grid.runner import run_plan
from experiments.grid.spec import DatasetChoice, ExperimentSpec, LoadChoice
from experiments.grid.store import Store
from experiments.reports.data import make_report
from experiments.reports.html import to_html
from experiments.reports.speed import by_length
from experiments.reports.text import to_markdown
from experiments.reports.tuning import EVERY
from experiments.stats.tuned import tuned
from tests.experiments.grid_runs import dataset, made_cell, pair_config, spec
from turnout.errors import TurnoutError
from turnout.types import SamplingParams

TEMPERATURES = {"name": "plain", "label": "warm", "sampling_grid": {"temperature": [0.5, 1]}, "seeds": [0, 1, 2]}
METHODS = [{"name": "plain"}, TEMPERATURES]


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configuration of a tiny random pair."""
    return pair_config(tmp_path_factory.mktemp("axis-pair"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty one."""
    dataset(tmp_path)
    return Store(tmp_path / "store")


def test_a_cell_without_the_axis_keeps_the_address_of_its_format() -> None:
    choice = DatasetChoice.model_validate({"path": "made.jsonl", "scorer": {"kind": "exact"}})
    sampling = SamplingParams(temperature=0.0, max_tokens=160)
    cell = Cell("pool", "any", "plain", {"model": "large"}, choice, LoadChoice(), 0, sampling, depends={"code": "1"})
    assert (FORMAT, cell.address) == (2, "afbd5b39d109a7ceb29f6906")


def test_a_setting_of_the_axis_is_the_cell_of_a_grid_asked_so_altogether(
    pair: Path, store: Store, tmp_path: Path
) -> None:
    asked = spec(pair, tmp_path, methods=METHODS)
    cells = make_plan(asked, store).cells
    assert [(cell.label, cell.seed) for cell in cells] == [
        ("plain", 0),
        *((f"warm temperature={value}", seed) for value in (0.5, 1) for seed in (0, 1, 2)),
    ]
    assert count_cells(asked) == len(cells)
    everywhere = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True}
    whole = spec(pair, tmp_path, methods=[{"name": "plain"}], sampling=everywhere, seeds=[1])
    [same] = make_plan(whole, store).cells
    assert same.address == next(c.address for c in cells if c.label == "warm temperature=1" and c.seed == 1)
    assert cells[0].address == make_plan(spec(pair, tmp_path, methods=[{"name": "plain"}]), store).cells[0].address


def test_ways_without_labels_say_how_they_choose(pair: Path, tmp_path: Path) -> None:
    entry = {"name": "plain", "sampling": {"temperature": 1.0}, "sampling_grid": {"top_p": [0.8, 0.9]}}
    asked = spec(pair, tmp_path, methods=[{"name": "plain"}, entry])
    assert [way.label for way in ways(asked)] == [
        "plain",
        "plain top_p=0.8 temperature=1.0",
        "plain top_p=0.9 temperature=1.0",
    ]
    axis = asked.methods[1]
    assert not isinstance(axis, str)
    assert axis.family == "plain+temperature+top_p"


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"sampling": {"max_tokens": 5}}, "'max_tokens' must be one of temperature, top_p"),
        ({"sampling": {"top_p": 1.0}, "sampling_grid": {"top_p": [0.5]}}, "top_p stands in sampling and in sampling_"),
        ({"params": {"model": "small"}, "grid": {"model": ["large"]}}, "model stands in params and in grid"),
    ],
)
def test_an_entry_at_fault_is_named(pair: Path, tmp_path: Path, entry: dict[str, Any], said: str) -> None:
    dataset(tmp_path)
    with pytest.raises(TurnoutError, match=said):
        spec(pair, tmp_path, methods=[{"name": "plain"}, {"name": "plain", "label": "other", **entry}])


def test_a_value_that_cannot_be_is_named_before_anything_runs(pair: Path, store: Store, tmp_path: Path) -> None:
    entry = {"name": "plain", "label": "hot", "sampling_grid": {"temperature": [9.0]}}
    with pytest.raises(TurnoutError, match=r"methods\.1\.sampling\.temperature"):
        make_plan(spec(pair, tmp_path, methods=[{"name": "plain"}, entry]), store)


def test_a_seed_that_the_baseline_lacks_is_compared_with_one_it_has(pair: Path, store: Store, tmp_path: Path) -> None:
    asked = spec(pair, tmp_path, methods=METHODS, stop={"margin": 0.5, "alpha": 0.06})
    plan = make_plan(asked, store)
    base = next(job.cell for job in plan.todo if job.cell.label == "plain")
    others = [job for job in plan.todo if job.cell.label != "plain"]
    assert len(others) == 6
    assert {job.baseline.address for job in others if job.baseline} == {base.address}
    assert [job.stop.alpha for job in others if job.stop] == [pytest.approx(0.06 / 6)] * 6


def test_settings_are_drawn_with_each_seed_and_reported_as_such(pair: Path, store: Store, tmp_path: Path) -> None:
    again = {"name": "plain", "label": "again"}
    once = {"name": "plain", "label": "once", "sampling": {"temperature": 0.2}}
    asked = spec(pair, tmp_path, methods=[*METHODS, again, once])
    assert run_plan(make_plan(asked, store), store).failed == {}
    drawn = {
        cell.seed: [record.text for record in store.records(cell)]
        for cell in store.load("small").cells
        if cell.label == "warm temperature=1"
    }
    assert len({tuple(texts) for texts in drawn.values()}) == 3
    report = make_report(store.load("small"), store)
    lines = {line.label: line for line in report.lines}
    assert lines["plain"].quality == lines["again"].quality
    assert (lines["plain"].seeds, lines["plain"].sampling) == (1, "")
    assert (lines["warm temperature=0.5"].seeds, lines["warm temperature=0.5"].sampling) == (3, "temperature=0.5")
    assert {line.family: line.settings for line in report.tuned} == {EVERY: 5, "warm": 2}
    assert report.power[-1] == "rows, near, 8 at once: drawn with one seed only: once"
    assert report.curves == []
    assert "6, 3 seeds" in to_markdown(report)
    assert "## Fixed and tuned settings" in to_markdown(report)
    assert "Fixed and tuned settings" in to_html(report)


Scores = npt.NDArray[np.float64]


@given(data=st.data())
def test_a_fixed_setting_is_never_better_than_the_tuned_one_where_it_was_tuned(data: st.DataObject) -> None:
    settings, tasks = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    unit = st.floats(0.0, 1.0)
    scores: list[Scores] = [
        data.draw(arrays(np.float64, (settings, data.draw(st.integers(1, 12))), elements=unit)) for _ in range(tasks)
    ]
    found = tuned(scores)
    assert (found.fixed_scores <= found.tuned_scores).all()
    known = found.spread[~np.isnan(found.spread)]
    assert ((known >= 0.0) & (known <= 1.0)).all()
    if settings == 1:
        assert (found.fixed_scores == found.tuned_scores).all()
        whole = [float(each.mean()) for each in scores if each.shape[1] > 1]
        assert found.held_out[~np.isnan(found.held_out)] == pytest.approx(whole)


def test_settings_by_hand() -> None:
    """Task one likes the first setting and task two the second, which is best on the mean of both."""
    one = np.array([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0]])
    two = np.array([[0.0, 0.0], [1.0, 1.0]])
    found = tuned([one, two])
    assert (found.fixed, found.best) == (1, [0, 1])
    assert found.fixed_scores == pytest.approx([0.5, 1.0])
    assert found.tuned_scores == pytest.approx([0.75, 1.0])
    assert found.spread == pytest.approx([1 - 0.5 / 0.75, 1.0])
    # Of the first task the odd prompts choose the first setting, right on both even ones; the even ones tie and take it
    # too, right on one of the odd.
    assert found.held_out == pytest.approx([0.75, 1.0])
    with pytest.raises(ValueError, match="same settings"):
        tuned([one, two[:1]])


def test_families_are_tuned_over_all_datasets_of_a_place(tmp_path: Path) -> None:
    store, cells = Store(tmp_path), list[Cell]()
    scores = {
        ("plain", "one"): [1, 1, 0, 0], ("hot t=1", "one"): [1, 1, 1, 0], ("hot t=2", "one"): [0, 0, 0, 0],
        ("plain", "two"): [1, 1, 1, 1], ("hot t=1", "two"): [0, 0, 0, 1], ("hot t=2", "two"): [1, 1, 1, 0],
    }  # fmt: skip
    for (label, task), values in scores.items():
        choice = DatasetChoice.model_validate({"name": task, "path": f"{task}.jsonl", "scorer": {"kind": "exact"}})
        cell = replace(made_cell(f"{label} {task}"), label=label, dataset=choice)
        store.save_chunk(cell, 0, [Record(f"p{n}", float(v), "x", 8) for n, v in enumerate(values)], Facts())
        store.finish(cell, Facts())
        cells.append(cell)
    rows = [{"name": task, "path": f"{task}.jsonl", "scorer": {"kind": "exact"}} for task in ("one", "two")]
    axis = {"name": "plain", "label": "hot", "grid": {"t": [1, 2]}}
    asked = {"name": "made", "methods": [{"name": "plain"}, axis], "datasets": rows}
    store.save(ExperimentSpec.model_validate(asked), cells, {})
    lines = {(line.family, line.dataset): line for line in make_report(store.load("made"), store).tuned}
    hot = lines["hot", "one"], lines["hot", "two"]
    assert [(line.fixed, line.best) for line in hot] == [
        (("hot t=1", 0.75), ("hot t=1", 0.75)),
        (("hot t=1", 0.25), ("hot t=2", 0.75)),
    ]
    assert [line.gap for line in hot] == [0.0, 0.5]
    assert lines[EVERY, "one"].best == ("hot t=1", 0.75)
    assert lines[EVERY, "two"].fixed == ("plain", 1.0)
    assert set(lines) == {(family, task) for family in ("hot", EVERY) for task in ("one", "two")}


def test_speed_is_told_by_length_beside_the_baseline() -> None:
    base = [Record("a", tokens=10, wall_s=1.0), Record("b", tokens=14, wall_s=1.4), Record("c", tokens=40, wall_s=8.0)]
    mine = [Record("a", tokens=12, wall_s=0.6), Record("b", tokens=3, wall_s=0.3), Record("c", error="refused")]
    short, longer = by_length(mine, base)
    assert (short.at_least, short.answers, short.relative) == (1, 1, None)
    assert (longer.at_least, longer.tokens) == (8, 12.0)
    assert longer.seconds_per_token == pytest.approx(0.05)
    assert longer.relative == pytest.approx(0.1 / 0.05)
    assert [each.relative for each in by_length(base, base)] == [1.0, 1.0]
