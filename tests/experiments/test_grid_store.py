"""What is kept of an experiment is read back as it was."""

from __future__ import annotations

from pathlib import Path

from experiments.grid.cells import Facts, Record
from experiments.grid.store import Store
from tests.experiments.grid_runs import made_cell

# All that Python takes for the end of a line; in JSON some of them stand as they are.
ENDS = "a\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029z"


def test_answers_with_line_separators_are_read_back(tmp_path: Path) -> None:
    records = [Record(f"id {ENDS}", text=ENDS, pieces=[("large", "decoded", ENDS)], note=ENDS), Record("next")]
    store, cell = Store(tmp_path), made_cell("plain")
    store.save_chunk(cell, 0, records, Facts())
    assert store.records(cell) == records
    store.finish(cell, Facts())
    assert [count for _, count in store.every_facts()] == [2]
