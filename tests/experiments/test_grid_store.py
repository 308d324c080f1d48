"""What is kept of an experiment is read back as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments.grid.bench import Job
from experiments.grid.cells import Facts, Record
from experiments.grid.planning import Plan
from experiments.grid.runner import _Tally
from experiments.grid.store import Saved, Store
from tests.experiments.grid_runs import made_cell, save_made
from turnout.config import TurnoutConfig

# All that Python takes for the end of a line; in JSON some of them stand as they are.
ENDS = "a\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029z"


def test_answers_with_line_separators_are_read_back(tmp_path: Path) -> None:
    records = [Record(f"id {ENDS}", text=ENDS, pieces=[("large", "decoded", ENDS)], note=ENDS), Record("next")]
    store, cell = Store(tmp_path), made_cell("plain")
    store.save_chunk(cell, 0, records, Facts())
    assert store.records(cell) == records
    store.finish(cell, Facts())
    assert [count for _, _, count in store.every_facts()] == [2]


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
