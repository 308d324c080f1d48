"""Planning a grid: how much work it takes before anything is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.grid.cells import Cell
from experiments.grid.planning import make_plan
from experiments.grid.store import Store
from tests.experiments.grid_runs import dataset, pair_config, spec


def test_a_grid_twice_as_large_takes_twice_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, address, computed = pair_config(tmp_path), Cell.address.fget, list[Cell]()  # type: ignore[attr-defined]
    dataset(tmp_path)

    def counted(self: Cell) -> str:
        computed.append(self)
        return str(address(self))

    monkeypatch.setattr(Cell, "address", property(counted))

    def work(cells: int) -> int:
        computed.clear()
        settings = [n / cells for n in range(1, cells)]
        methods = [{"name": "plain"}, {"name": "entropy_adaptive", "grid": {"threshold": settings}}]
        plan = make_plan(spec(config, tmp_path, methods=methods), Store(tmp_path / "store"))
        assert len(plan.todo) == cells
        return len(computed)

    assert work(80) <= 2.1 * work(40)


def test_all_cells_that_may_stop_share_one_chance_of_a_wrong_stop(tmp_path: Path) -> None:
    dataset(tmp_path)
    methods = [{"name": "plain"}, {"name": "entropy_adaptive", "grid": {"threshold": [1.0, 2.0, 3.0]}}]
    asked = spec(
        pair_config(tmp_path),
        tmp_path,
        methods=methods,
        seeds=[0, 1],
        loads=[{"at_once": 2}, {"rate": 5.0, "duration_s": 1.0}],
        stop={"alpha": 0.04},
    )
    rules = [job.stop for job in make_plan(asked, Store(tmp_path / "store")).todo]
    assert [rule.alpha for rule in rules if rule is not None] == [pytest.approx(0.04 / 6)] * 6
