"""The report of a sweep: figures where they mean something, and VOID where they do not."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.load_table import Sweep, page
from experiments.load.metrics import Objective, summarise
from experiments.load.records import LoadResult, Plan, Record

OBJECTIVE = Objective(0.5, 0.1)


def sweep(client_cpu: float = 0.2) -> Sweep:
    plan = Plan("grpc", "a:1", "poisson", 1.0, 2.0, 0, ("p",), "demo", 8)
    records = (Record(0.0, 0.01, 0.25, 0.45, 5), Record(1.0, 1.0, error="RESOURCE_EXHAUSTED"))
    runs = [summarise(LoadResult(plan, records, client_cpu), OBJECTIVE)]
    return Sweep({"cores": "2"}, "demo", OBJECTIVE, 2.0, 8, 4.0, runs, server_cpu=[1.5])


def test_a_row_shows_what_was_offered_answered_and_refused() -> None:
    [row] = [line for line in page(sweep()).markdown().splitlines() if line.startswith("| grpc")]
    assert row == (
        "| grpc | poisson | 1.0 | 0.5 | 11 | 250 / 250 / 250 | 50 / 50 / 50 | 450 / 450 / 450 "
        "| 1 RESOURCE_EXHAUSTED | 10 | 0.20 | 1.50 |"
    )
    assert "VOID" not in page(sweep()).markdown()


def test_a_busy_client_is_called_void_and_shows_no_goodput() -> None:
    text = page(sweep(client_cpu=0.9)).markdown()
    assert "| grpc | poisson | 1.0 | VOID |" in text
    assert "VOID: the client used more than 70% of a core" in text


def test_results_are_saved_as_page_numbers_and_plot(tmp_path: Path) -> None:
    page(sweep()).save(tmp_path / "load.md")
    assert "(load.png)" in (tmp_path / "load.md").read_text()
    assert (tmp_path / "load.png").stat().st_size > 1000
    [run] = json.loads((tmp_path / "load.json").read_text())["runs"]
    assert (run["requests"], run["answered"], run["errors"]) == (2, 1, {"RESOURCE_EXHAUSTED": 1})
