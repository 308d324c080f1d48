"""Idealised runtimes beside what was measured: time, price and energy of single requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.costs.ideal_latency import IdealisedRuntime
from experiments.grid import bench, depends
from experiments.grid.cells import Facts, Record
from experiments.grid.planning import make_plan
from experiments.grid.references import Reference
from experiments.grid.runner import run_plan
from experiments.grid.spec import ExperimentSpec
from experiments.grid.store import Store
from experiments.reports.data import make_report
from experiments.reports.efficiency import Efficiency, efficiency
from experiments.reports.table import Column, Group
from experiments.reports.text import to_markdown
from tests.experiments.grid_runs import dataset, pair_config, spec

SMALL = IdealisedRuntime((1, 101), (0.01, 0.02), 1e-3, 0.0)
LARGE = IdealisedRuntime((1, 101), (0.04, 0.08), 4e-3, 1e-5)
REFERENCE = Reference("key", {"processor": "made"}, {"small": SMALL, "large": LARGE}, {"small": 0.01, "large": 0.02})
ASKED = {"name": "made", "methods": [{"name": "plain"}], "datasets": [{"path": "x.jsonl", "scorer": {"kind": "exact"}}]}


def written(prompt: int, rounds: int = 0, **by: int) -> Record:
    """An answer whose tokens these models wrote."""
    return Record("p", 1.0, "x", sum(by.values()), rounds=rounds, prompt_tokens=prompt, generated=by)


def spent(record: Record, energy_j: float | None = None, **asked: float) -> Efficiency:
    """The figures of one answer that took 2 s."""
    column = Column("plain", "plain", nats=False, facts=[Facts(wall_s=2.0, energy_j=energy_j)])
    column.records[0, "p"] = record
    group = Group("pool", "data", "load", nats=False, columns={"plain": column})
    [line] = efficiency([group], ExperimentSpec.model_validate({**ASKED, **asked}), {"pool": REFERENCE})
    return line


@given(prompt=st.integers(1, 3000), output=st.integers(1, 500))
def test_an_answer_of_one_model_takes_its_idealised_runtime(prompt: int, output: int) -> None:
    assert REFERENCE.seconds(written(prompt, large=output, small=0)) == pytest.approx(LARGE.seconds(prompt, output))


def test_tokens_are_charged_to_the_model_that_wrote_them() -> None:
    # Both read the prompt of 101; nine more of the small model, four more of the large at about 101 + 7.5.
    expected = (0.02 + 9 * 1e-3) + (0.08 + 4 * (4e-3 + 1e-5 * 108.5))
    assert REFERENCE.seconds(written(101, small=10, large=5)) == pytest.approx(expected)


def test_there_is_no_idealised_time_of_rounds_of_speculation_or_of_unknown_models() -> None:
    assert REFERENCE.seconds(written(10, rounds=3, large=5)) is None
    assert REFERENCE.seconds(written(10, other=5)) is None
    assert REFERENCE.seconds(Record("p", 0.0, error="refused")) is None


def test_cost_is_time_by_accelerators_by_price_and_energy_time_by_power() -> None:
    record = written(101, large=26)
    ideal = 0.08 + 25 * 4e-3 + 1e-5 * (25 * 101 + 25 * 26 / 2)
    line = spent(record, price_per_hour=7.2, accelerators=4, watts=50.0)
    assert line.idealised_s == pytest.approx(ideal)
    assert line.idealised_price == pytest.approx(1000 * ideal * 4 * 7.2 / 3600)
    assert line.price == pytest.approx(1000 * 2.0 * 4 * 7.2 / 3600)
    assert line.idealised_joules == pytest.approx(ideal * 4 * 50.0)
    assert line.joules == pytest.approx(2.0 * 4 * 50.0)
    assert line.aec_w is None
    # Where the machine has a meter, what it says holds, and not what was stated.
    metered = spent(record, energy_j=60.0, watts=50.0)
    assert metered.aec_w == pytest.approx(30.0)
    assert metered.joules == pytest.approx(60.0)
    assert metered.idealised_joules == pytest.approx(ideal * 30.0)
    unknown = spent(record)
    assert (unknown.price, unknown.joules, unknown.idealised_price, unknown.idealised_joules) == (None,) * 4


def test_a_reference_is_measured_once_and_again_when_what_it_depends_on_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset(tmp_path)
    store = Store(tmp_path / "store")
    asked = spec(
        pair_config(tmp_path, max_length=128), tmp_path, methods=[{"name": "plain"}], idealised=True, watts=10.0
    )
    assert run_plan(make_plan(asked, store), store).failed == {}
    kept = store.kept("small", "references")["near"]
    assert Reference.from_dict(json.loads(json.dumps(kept))).as_dict() == Reference.from_dict(kept).as_dict()
    assert set(kept["runtimes"]) == {"small", "large"}
    again = make_plan(asked, store)
    assert (again.todo, again.references) == ([], {})
    report = make_report(store.load("small"), store)
    [line] = report.efficiency
    assert line.idealised_s is not None
    assert line.idealised_s > 0.0
    assert line.idealised_joules == pytest.approx(10.0 * line.idealised_s)
    assert "Idealised runtimes" in to_markdown(report)
    known = depends._versions()
    monkeypatch.setattr(depends, "_versions", lambda: {**known, "torch": "9.9"})
    assert list(make_plan(asked, store).references) == ["near"]


def test_a_pool_that_cannot_be_measured_is_named_and_its_cells_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(pool: object, key: str) -> Reference:
        raise RuntimeError("a fault of ours")

    dataset(tmp_path)
    monkeypatch.setattr(bench, "measure_reference", broken)
    store = Store(tmp_path / "store")
    asked = spec(pair_config(tmp_path, max_length=128), tmp_path, methods=[{"name": "plain"}], idealised=True)
    ran = run_plan(make_plan(asked, store), store)
    assert ran.done == 1
    assert ran.failed == {"what single requests take on near": "RuntimeError: a fault of ours"}
