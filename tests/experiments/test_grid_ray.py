"""Cells run by Ray actors, one of which is killed at work."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from experiments.grid import runner
from experiments.grid.planning import make_plan
from experiments.grid.runner import Ran, run_plan
from experiments.grid.store import Store
from experiments.own_ray import ray_of_its_own
from experiments.process_memory import tree
from tests.experiments.grid_runs import dataset, pair_config, spec
from turnout.errors import Code, TurnoutError

pytestmark = pytest.mark.cluster


def worker_at_work() -> int | None:
    """The process of an actor that is running a cell; None: none is."""
    for pid in tree(os.getpid()):
        try:
            if b"ray::RayBench.run" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        except OSError:
            continue  # it ended while we looked
    return None


def test_a_worker_that_dies_costs_its_cell_and_the_next_run_makes_it_good(tmp_path: Path) -> None:
    dataset(tmp_path, [{"id": n, "prompt": f"prompt number {n}"} for n in range(60)])
    sampling = {"temperature": 0, "max_tokens": 40}
    config = pair_config(tmp_path, max_length=128)
    asked = spec(config, tmp_path, workers=1, chunk=1, sampling=sampling, idealised=True)
    store = Store(tmp_path / "store")
    plan, killed, over = make_plan(asked, store), threading.Event(), threading.Event()

    def kill() -> None:
        while not over.wait(0.02):
            pid = worker_at_work()
            if pid is not None and any(store.chunks(cell) for cell in plan.cells):
                os.kill(pid, signal.SIGKILL)
                killed.set()
                return

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        ran = run_plan(plan, store)
    finally:
        over.set()
        killer.join()
    assert killed.is_set()
    [(name, why)] = ran.failed.items()
    assert why.startswith("its process ended")
    assert ran.done == 2
    assert set(store.kept("small", "references")["near"]["runtimes"]) == {"small", "large"}
    [cell] = [cell for cell in plan.cells if cell.name == name]
    kept = len(store.chunks(cell))
    again = make_plan(asked, store)
    assert [job.cell.name for job in again.todo] == [name]
    assert run_plan(again, store).failed == {}
    assert [record.id for record in store.records(cell)] == [str(n) for n in range(60)]
    assert 0 < kept < 60
    assert [(run["done"], run["failed"]) for run in store.kept("small", "runs")["runs"]] == [(2, 1), (1, 0)]


def test_workers_for_whom_there_is_no_place_are_named_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset(tmp_path, [{"id": n, "prompt": f"prompt number {n}"} for n in range(3)])
    config, store = pair_config(tmp_path, max_length=128), Store(tmp_path / "store")
    monkeypatch.setattr(runner, "PLACED_S", 2.0)
    with pytest.raises(
        TurnoutError, match="no worker has found a place within 2 s: each takes one CPU and 1 GPUs"
    ) as no:
        run_plan(make_plan(spec(config, tmp_path, workers=1, gpus=1), store), store)
    assert (no.value.code, no.value.field) == (Code.RESOURCE_EXHAUSTED, "workers")
    # Where there is a place for some of them, these do the work.
    monkeypatch.setattr(runner, "PLACED_S", 120.0)
    monkeypatch.setattr(runner, "PLACED_MORE_S", 2.0)
    monkeypatch.setattr(runner, "_joined", lambda workers: ray_of_its_own(1))
    asked = make_plan(spec(config, tmp_path, workers=2, methods=[{"name": "plain"}, {"name": "speculative"}]), store)
    assert run_plan(asked, store) == Ran(2, {})
