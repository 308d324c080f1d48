"""What an experiment would take is told before it is run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.grid.estimates import estimate, estimated
from experiments.grid.planning import count_cells, make_plan
from experiments.grid.runner import run_plan
from experiments.grid.store import Store
from tests.experiments.grid_runs import dataset, pair_config, spec


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configuration of a tiny random pair."""
    return pair_config(tmp_path_factory.mktemp("estimates-pair"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty one."""
    dataset(tmp_path)
    return Store(tmp_path / "store")


def test_estimates_and_counts_come_before_anything_is_made(pair: Path, store: Store, tmp_path: Path) -> None:
    huge = spec(pair, tmp_path, seeds=list(range(1000)), loads=[{"at_once": n} for n in range(1, 334)])
    assert count_cells(huge) == 3 * 1000 * 333
    asked = spec(pair, tmp_path, price_per_hour=3.6)
    rough = estimate(make_plan(asked, store), store)
    assert (rough.cells, rough.prompts, rough.tokens) == (3, 18, 144)
    assert "rough guess" in str(rough)
    run_plan(make_plan(asked, store), store)
    known = estimate(make_plan(spec(pair, tmp_path, seeds=[1], price_per_hour=3.6), store), store)
    assert known.measured
    assert known.price == pytest.approx(known.seconds / 1000)
    four = estimate(make_plan(spec(pair, tmp_path, seeds=[1], price_per_hour=3.6, accelerators=4), store), store)
    assert four.price == pytest.approx(4 * four.seconds / 1000)


def test_what_other_models_took_is_no_estimate(pair: Path, store: Store, tmp_path: Path) -> None:
    mine, others = spec(pair, tmp_path, seeds=[1]), spec(pair, tmp_path, name="others")
    run_plan(make_plan(others, store), store)
    plan = make_plan(mine, store)
    assert estimate(plan, store).measured
    assert estimated(mine, plan.config, store, 1, 6).measured
    for path in (store.root / "cells").glob("*/*/cell.json"):
        values = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**values, "depends": {**values["depends"], "models": "x"}}), encoding="utf-8")
    rough = estimate(plan, store), estimated(mine, plan.config, store, 1, 6)
    assert [each.measured for each in rough] == [False, False]
