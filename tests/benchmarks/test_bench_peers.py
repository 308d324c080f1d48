"""The report of a comparison: goals met and missed, and engines that are not there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.bench_peers import Bench, save
from benchmarks.peers.plan import GOALS, OPENVINO, OURS, SIDES, THROUGHPUT, Goal, pair_work, random_model_work
from benchmarks.peers.table import Comparison, to_markdown
from benchmarks.peers.turns import Outcome

SETTING = {"dtype": "bfloat16", "threads": 2, "rounds": 3}
DECODE = "decode, batch 1"


def comparison(**values: list[float]) -> Comparison:
    outcome = Outcome(DECODE, "tokens/s", OURS, values=values)
    found = Comparison({"cores": "2"}, SETTING, subjects={"35 M": [outcome]})
    found.versions = {name: {"version": "1"} for name in values}
    return found


def row(page: str, *cells: str) -> str:
    [found] = [line for line in page.splitlines() if line.startswith(f"| {' | '.join(cells)} |")]
    return found


def test_an_environment_that_is_not_there_is_said_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Bench("bfloat16", 1, 1, peers_python=tmp_path / "python")
    bench.find_peers([OURS, OPENVINO])
    assert list(bench.comparison.versions) == [OURS]
    assert bench.comparison.missing == {OPENVINO: "make venv-peers"}
    assert "OpenVINO is not measured, not installed: make venv-peers" in capsys.readouterr().err
    bench.comparison.subjects["35 M"] = [Outcome(DECODE, "tokens/s", OURS, values={OURS: [10.0]})]
    page = to_markdown(bench.comparison)
    assert "| OpenVINO | not measured, not installed: make venv-peers |" in page
    assert row(page, "35 M", DECODE, OURS, "OpenVINO").endswith("| OpenVINO: not installed | >= 1 | not measured |")


def test_goals_are_judged_by_the_median_of_ratios() -> None:
    # Ratios 1.2, 0.9, 1.0 to OpenVINO: the median just meets 1.0; to generate 2.4, 2.25 and 2.0, asked 2.5.
    found = comparison(turnout=[12.0, 9.0, 10.0], OpenVINO=[10.0, 10.0, 10.0], generate=[5.0, 4.0, 5.0])
    page = to_markdown(found)
    assert row(page, "35 M", DECODE, OURS, "OpenVINO").endswith("| 1.00 [0.90, 1.20] | >= 1 | yes |")
    assert row(page, "35 M", DECODE, OURS, "generate").endswith("| 2.25 [2.00, 2.40] | >= 2.5 | no |")
    assert row(page, DECODE, "tokens/s") == (f"| {DECODE} | tokens/s | 10 [9, 12] | 5 [4, 5] | 10 [10, 10] |")


def test_a_goal_is_judged_for_each_of_our_settings() -> None:
    found = comparison(turnout=[8.0], **{THROUGHPUT: [12.0], "OpenVINO": [10.0]})
    page = to_markdown(found)
    assert row(page, "35 M", DECODE, OURS, "OpenVINO").endswith("| 0.80 [0.80, 0.80] | >= 1 | no |")
    assert row(page, "35 M", DECODE, THROUGHPUT, "OpenVINO").endswith("| 1.20 [1.20, 1.20] | >= 1 | yes |")


def test_an_engine_that_an_environment_lacks_is_named_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    # This interpreter has the project's packages, and none of the peers'.
    bench = Bench("bfloat16", 1, 1, peers_python=Path(sys.executable))
    bench.find_peers([OPENVINO])
    assert list(bench.comparison.missing) == [OPENVINO]
    assert "OpenVINO is not measured, not installed" in capsys.readouterr().err


def test_bounds_on_the_number_itself_are_upper_bounds() -> None:
    goal = Goal("35 M", "overhead", 0.1)
    assert goal.met(0.1)
    assert not goal.met(0.11)
    assert Goal("35 M", DECODE, 0.9, OPENVINO).met(0.9)
    assert not Goal("35 M", DECODE, 0.9, OPENVINO).met(0.89)


def test_ratios_without_a_goal_are_shown_too() -> None:
    found = comparison(turnout=[12.0, 9.0, 10.0], **{"OpenVINO batching": [8.0, 9.0, 10.0]})
    assert row(to_markdown(found), "35 M", DECODE, OURS, "OpenVINO batching").endswith("| 1.00 [1.00, 1.50] |  |  |")


def test_engines_that_answer_differently_are_named() -> None:
    found = comparison(turnout=[12.0], OpenVINO=[10.0])
    found.subjects["35 M"][0].agreement = {"turnout": 1.0, "OpenVINO": 0.5}
    assert "at least: OpenVINO 50%; others: all" in to_markdown(found)


def test_a_failure_and_a_disturbance_are_printed() -> None:
    found = comparison(turnout=[12.0])
    [outcome] = found.subjects["35 M"]
    outcome.failures[OPENVINO] = "loading: no memory"
    outcome.foreign_cpu = 0.5
    page = to_markdown(found)
    assert "OpenVINO failed at decode, batch 1: loading: no memory" in page
    assert "| 12 [12, 12] | failed |" in page
    assert "disturbs a measurement: decode, batch 1" in page
    outcome.foreign_cpu = 0.05
    assert "disturbs" not in to_markdown(found)


def test_every_goal_names_work_that_is_done_and_an_engine_that_does_it() -> None:
    work = {workload.name: names for workload, names in random_model_work().items()}
    for goal in GOALS:
        assert goal.against is None or goal.against in work[goal.workload]
        assert OURS in work[goal.workload]
    everyone = [*work.values(), *pair_work([[1]], 1).values()]
    assert {name for names in everyone for name in names} == set(SIDES)


def test_results_are_saved_with_every_round(tmp_path: Path) -> None:
    save(comparison(turnout=[12.0, 9.0, 10.0], OpenVINO=[10.0, 10.0, 10.0]), tmp_path)
    saved = json.loads((tmp_path / "peers.json").read_text())
    assert saved["subjects"]["35 M"][0]["values"]["turnout"] == [12.0, 9.0, 10.0]
    met = {verdict["against"]: verdict["met"] for verdict in saved["verdicts"]}
    assert met == {"OpenVINO": "yes", "generate": "not measured"}
    assert (tmp_path / "peers.md").read_text().startswith("# Turnout beside other engines")


@pytest.mark.parametrize("name", sorted(SIDES))
def test_every_side_is_a_module_with_an_engine(name: str) -> None:
    from importlib import import_module

    engine = import_module(f"benchmarks.peers.{SIDES[name].module}").Engine
    assert all(callable(getattr(engine, call)) for call in ("missing", "versions", "setup", "generate", "close"))
