"""What is kept of an experiment is read back as it was."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.grid.answering import fill
from experiments.grid.bench import Job
from experiments.grid.cells import Facts, Record
from experiments.grid.planning import Plan
from experiments.grid.runner import _Tally
from experiments.grid.store import Saved, Store
from tests.experiments.grid_runs import made_cell, save_made
from turnout.calls import Usage
from turnout.config import TurnoutConfig
from turnout.cost import Cost, CostReport, ModelMeter, SpeculationMeter
from turnout.errors import Code, TurnoutError

# All that Python takes for the end of a line; in JSON some of them stand as they are.
ENDS = "a\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029z"


def test_answers_with_line_separators_are_read_back(tmp_path: Path) -> None:
    records = [Record(f"id {ENDS}", text=ENDS, pieces=[("large", "decoded", ENDS)], note=ENDS), Record("next")]
    store, cell = Store(tmp_path), made_cell("plain")
    store.save_chunk(cell, 0, records, Facts())
    assert store.records(cell) == records
    store.finish(cell, Facts())
    assert [count for _, _, count in store.every_facts()] == [2]


def test_what_was_measured_of_a_chunk_that_was_not_written_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, cell, write = Store(tmp_path), made_cell("plain"), Store._write

    def full(self: Store, path: Path, text: str) -> None:
        if path.name == "chunk-000001.jsonl":
            raise TurnoutError(Code.RESOURCE_EXHAUSTED, "full")
        write(self, path, text)

    store.save_chunk(cell, 0, [Record("p0")], Facts(wall_s=1.0))
    with monkeypatch.context() as patched:
        patched.setattr(Store, "_write", full)
        with pytest.raises(TurnoutError, match="full"):
            store.save_chunk(cell, 1, [Record("p1")], Facts(wall_s=3.0))
    assert store.progress(cell).wall_s == 1.0
    store.save_chunk(cell, 1, [Record("p1")], Facts(wall_s=2.5))
    assert store.progress(cell).wall_s == 2.5


def test_what_no_experiment_has_any_more_is_pruned(tmp_path: Path) -> None:
    store = Store(tmp_path)
    save_made(store, "now", {"plain": np.ones(2)}, run=0)
    before = store.load("now")
    save_made(store, "now", {"plain": np.ones(2)}, run=1)  # its code has changed, say
    after = store.load("now")
    assert [store.state(saved.cells[0]) for saved in (before, after)] == ["done", "done"]
    assert store.prune() == 1
    assert [store.state(saved.cells[0]) for saved in (before, after)] == ["absent", "done"]
    assert store.prune() == 0


def changed(store: Store, name: str, part: str) -> None:
    """Write an experiment's file anew as another version would: with something this one does not know."""
    path = store.root / "experiments" / name / "experiment.json"
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    (values["spec"] if part == "spec" else values["cells"][0])["of another version"] = 1
    path.write_text(json.dumps(values), encoding="utf-8")


@pytest.mark.parametrize(("part", "pruned"), [("spec", 1), ("cells", 0)])
def test_an_experiment_of_another_format_is_named_and_keeps_its_cells(
    tmp_path: Path, part: str, pruned: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path)
    save_made(store, "other", {"plain": np.ones(2)}, run=0)
    save_made(store, "gone", {"plain": np.ones(2)}, run=1)
    save_made(store, "gone", {"plain": np.ones(2)}, run=2)
    cell = store.load("other").cells[0]
    changed(store, "other", part)
    with pytest.raises(TurnoutError, match="'other' cannot be read") as refusal:
        store.load("other")
    assert refusal.value.code is Code.INVALID_ARGUMENT
    assert store.prune() == pruned
    assert store.state(cell) == "done"
    assert [record.message for record in caplog.records] == [
        "the cells of other are not known, so all are kept until it is removed"
    ] * (part == "cells")
    store.remove("other")
    assert store.names() == ["gone"]
    store.prune()
    assert [store.state(each) for each in (cell, store.load("gone").cells[0])] == ["absent", "done"]


def test_cells_of_another_format_are_left_out_of_estimates_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path)
    save_made(store, "made", {"plain": np.ones(2), "torn": np.ones(2), "other": np.ones(2)}, run=0)
    plain, torn, other = store.load("made").cells
    (store._cell(torn.address) / "cell.json").write_text('{"pool": ')
    values = {**other.as_dict(), "of another version": 1}
    (store._cell(other.address) / "cell.json").write_text(json.dumps(values))
    with caplog.at_level(logging.WARNING):
        assert [cell.address for cell, _, _ in store.every_facts()] == [plain.address]
    [said] = [record.message for record in caplog.records]
    assert said.startswith("cells that cannot be read are left out: 2, the first ")


def test_a_relative_store_is_the_same_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster's actors work in folders of their own."""
    monkeypatch.chdir(tmp_path)
    store, cell = Store(Path("kept")), made_cell("plain")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.finish(cell, Facts())
    assert Store(tmp_path / "kept").state(cell) == "done"


def test_a_cell_whose_results_lie_where_nobody_sees_them_is_not_done(tmp_path: Path) -> None:
    saved = _saved(tmp_path)
    tally = _Tally(
        Plan(saved.spec, TurnoutConfig.demo(), list(saved.cells), {}, [], 0), Store(tmp_path), lambda *_: None
    )
    here, elsewhere = saved.cells[0], made_cell("plain", run=7)
    tally.ended(Job(here, None), None)
    tally.ended(Job(elsewhere, None), None)
    assert tally.done == 1
    assert list(tally.failed) == [elsewhere.name]
    assert "a disk that all nodes share" in tally.failed[elsewhere.name]
    assert Store(tmp_path).state(elsewhere) == "failed"


def _saved(folder: Path) -> Saved:
    save_made(Store(folder), "made", {"plain": np.ones(2)}, run=0)
    return Store(folder).load("made")


def test_a_record_counts_what_the_large_model_wrote_and_a_switch_dropped() -> None:
    models = {
        "small": ModelMeter(10, generated_tokens=6, discarded_tokens=3),
        "large": ModelMeter(40, generated_tokens=2, discarded_tokens=1),
    }
    cost = CostReport(Cost(0.5, 9.0, 1.0), Cost(1.0, 9.0, 1.0), 3 / 8, 2 / 8)
    record = Record("p")
    fill(record, Usage(5, 8, 0, models, SpeculationMeter(), 4, cost, "x", {}, 1, 0.1, 0.2), "large")
    assert (record.tokens, record.by_large, record.generated) == (8, 3, {"small": 9, "large": 3})
