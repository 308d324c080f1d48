"""Answers prompt by prompt: every way on a page of bounded size, and all of them for a program."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments.grid import runner
from experiments.grid.cells import Facts, Record
from experiments.grid.planning import make_plan
from experiments.grid.runner import run_plan
from experiments.grid.spec import ExperimentSpec
from experiments.grid.store import Store
from experiments.reports import answers
from experiments.reports.answers import LONGEST, PAGE_BYTES, SHOWN_PROMPTS, every_answer, shown_answers
from experiments.reports.data import make_report
from experiments.reports.html import to_html
from experiments.reports.table import read_table
from experiments.reports.text import to_json, to_markdown
from tests.experiments.grid_runs import dataset, made_cell, pair_config, save_made, spec

WAYS = 60


def made(store: Store, texts: dict[str, list[str]]) -> None:
    """An experiment with these answers by way; the first of each way is right."""
    rows = {"path": "made.jsonl", "scorer": {"kind": "exact"}}
    labels = [{"name": "plain", "label": label} for label in texts]
    cells = [made_cell(label) for label in texts]
    for cell, each in zip(cells, texts.values(), strict=True):
        records = [
            Record(f"p{n}", float(n == 0), text, 8, pieces=[("large", "decoded", text)]) for n, text in enumerate(each)
        ]
        store.save_chunk(cell, 0, records, Facts())
        store.finish(cell, Facts())
    values = {"name": "made", "methods": labels, "datasets": [rows], "baseline": next(iter(texts))}
    store.save(ExperimentSpec.model_validate(values), cells, {})


def test_every_way_can_be_looked_at(tmp_path: Path) -> None:
    store = Store(tmp_path)
    made(store, {f"way{n}": [f"says {n} to {prompt}" for prompt in range(3)] for n in range(WAYS)})
    page = to_html(make_report(store.load("made"), store))
    assert [n for n in range(WAYS) if f"says {n} to 1<" not in page] == []
    [group] = read_table(store.load("made"), store).groups.values()
    found = list(every_answer([group]))
    assert [each["prompt"] for each in found] == ["p0", "p1", "p2"]
    assert all(len(each["ways"]) == WAYS for each in found)
    assert found[2]["ways"]["way59"]["text"] == "says 59 to 2"


def test_ways_with_one_answer_stand_together(tmp_path: Path) -> None:
    store = Store(tmp_path)
    made(store, {f"way{n}": ["the same", f"says {n % 2}"] for n in range(6)})
    report = make_report(store.load("made"), store)
    ways = {each["prompt"]: [way["labels"] for way in each["ways"]] for each in report.answers}
    assert ways["p0"] == [[f"way{n}" for n in range(6)]]
    assert ways["p1"] == [["way0", "way2", "way4"], ["way1", "way3", "way5"]]
    assert "way0, way2, way4" in to_html(report)


def test_prompts_on_which_ways_differ_come_first(tmp_path: Path) -> None:
    store, right = Store(tmp_path), np.ones(40)
    wrong = right.copy()
    wrong[[7, 31]] = 0.0
    save_made(store, "made", {"plain": right, "other": wrong}, run=0)
    [group] = read_table(store.load("made"), store).groups.values()
    shown = shown_answers([group])
    assert len(shown) == SHOWN_PROMPTS
    assert {each["prompt"] for each in shown[:2]} == {"p7", "p31"}
    assert len(list(every_answer([group]))) == 40


def test_a_page_stays_within_its_size_and_says_what_is_not_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    made(store, {f"way{n}": [f"{n}{prompt}" + "<&\u2028" * LONGEST for prompt in range(6)] for n in range(WAYS)})
    report = make_report(store.load("made"), store)
    page = to_html(report)
    assert 0.5 * PAGE_BYTES < len(page.encode()) < 1.2 * PAGE_BYTES
    assert len(to_json(report).encode()) < 2 * PAGE_BYTES
    assert f"({3 * LONGEST + 2 - LONGEST} characters more)" in page
    monkeypatch.setattr(answers, "PAGE_BYTES", 400_000)
    [entry] = make_report(store.load("made"), store).answers
    assert 0 < len(entry["ways"]) < WAYS
    assert len(entry["ways"]) + entry["without"] == WAYS


def test_the_time_of_a_run_is_kept_also_of_one_that_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset(tmp_path)
    store = Store(tmp_path / "store")
    asked = spec(pair_config(tmp_path), tmp_path, methods=[{"name": "plain"}, {"name": "speculative"}])
    work, cells = runner.attempted, list[str]()

    async def cut(*args: object) -> object:
        cells.append(str(args[1]))
        if len(cells) == 2:
            args[0].close()  # type: ignore[attr-defined]
            raise KeyboardInterrupt
        return await work(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(runner, "attempted", cut)
        with pytest.raises(KeyboardInterrupt):
            run_plan(make_plan(asked, store), store)
    run_plan(make_plan(asked, store), store)
    run_plan(make_plan(asked, store), store)  # computes nothing
    run = make_report(store.load("small"), store).run
    assert [(each["done"], each["failed"], each["workers"]) for each in run.runs] == [(1, 0, 0), (1, 0, 0)]
    facts = [store.facts(cell) for cell in store.load("small").cells]
    assert run.answering_s == pytest.approx(sum(each.wall_s for each in facts if each is not None))
    assert run.wall_s is not None
    assert run.wall_s > run.answering_s
    assert "on the clock in 2 runs" in to_markdown(make_report(store.load("small"), store))


def test_a_run_of_an_earlier_version_has_no_time(tmp_path: Path) -> None:
    store = Store(tmp_path)
    save_made(store, "made", {"plain": np.ones(3)}, run=0)
    run = make_report(store.load("made"), store).run
    assert (run.wall_s, run.answering_s) == (None, 1.0)
    assert str(run).startswith("not kept; 1 s of answering")
