"""The report of a comparison: goals met and missed, and engines that are not there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.bench_peers import Bench
from benchmarks.peers.overview import overview, page_of
from benchmarks.peers.plan import (
    OPENVINO,
    OURS,
    SIDES,
    TARGETS,
    THROUGHPUT,
    pair_work,
    random_model_work,
    real_text_work,
)
from benchmarks.peers.table import Comparison, page
from benchmarks.peers.turns import Outcome

SETTING = {"dtype": "bfloat16", "threads": 2, "rounds": 3}
DECODE = "decode, batch 1"


def comparison(**values: list[float]) -> Comparison:
    outcome = Outcome(DECODE, "tokens/s", OURS, values=values)
    found = Comparison({"cores": "2"}, SETTING, subjects={"35 M": [outcome]})
    found.versions = {name: {"version": "1"} for name in values}
    return found


def row(text: str, *cells: str) -> str:
    [found] = [line for line in text.splitlines() if line.startswith(f"| {' | '.join(cells)} |")]
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
    text = page(bench.comparison).markdown()
    assert "| OpenVINO | not measured, not installed: make venv-peers |" in text
    assert row(text, "35 M", DECODE, OURS, "OpenVINO").endswith("| OpenVINO: not installed | >= 1 | not measured |")


def test_goals_are_judged_by_the_median_of_ratios() -> None:
    # Ratios 1.2, 0.9, 1.0 to OpenVINO: the median just meets 1.0; to generate 2.4, 2.25 and 2.0, asked 2.5.
    found = comparison(turnout=[12.0, 9.0, 10.0], OpenVINO=[10.0, 10.0, 10.0], generate=[5.0, 4.0, 5.0])
    text = page(found).markdown()
    assert row(text, "35 M", DECODE, OURS, "OpenVINO").endswith("| 1.00 [0.90, 1.20] | >= 1 | yes |")
    assert row(text, "35 M", DECODE, OURS, "generate").endswith("| 2.25 [2.00, 2.40] | >= 2.5 | no |")
    assert row(text, DECODE, "tokens/s") == (f"| {DECODE} | tokens/s | 10 [9, 12] | 5 [4, 5] | 10 [10, 10] |")


def test_a_goal_is_judged_for_each_of_our_settings() -> None:
    found = comparison(turnout=[8.0], **{THROUGHPUT: [12.0], "OpenVINO": [10.0]})
    text = page(found).markdown()
    assert row(text, "35 M", DECODE, OURS, "OpenVINO").endswith("| 0.80 [0.80, 0.80] | >= 1 | no |")
    assert row(text, "35 M", DECODE, THROUGHPUT, "OpenVINO").endswith("| 1.20 [1.20, 1.20] | >= 1 | yes |")


def test_an_engine_that_an_environment_lacks_is_named_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    # This interpreter has the project's packages, and none of the peers'.
    bench = Bench("bfloat16", 1, 1, peers_python=Path(sys.executable))
    bench.find_peers([OPENVINO])
    assert list(bench.comparison.missing) == [OPENVINO]
    assert "OpenVINO is not measured, not installed" in capsys.readouterr().err


def test_a_goal_of_the_number_itself_is_an_upper_bound() -> None:
    found = comparison(turnout=[0.15])
    found.subjects["35 M"][0].workload = "TTFT after a shared prefix of 1500"
    text = page(found).markdown()
    assert row(text, "35 M", "TTFT after a shared prefix of 1500", OURS).endswith(
        "| 0.150 [0.150, 0.150] | <= 0.15 | yes |"
    )


def test_ratios_without_a_goal_are_shown_too() -> None:
    found = comparison(turnout=[12.0, 9.0, 10.0], **{"OpenVINO batching": [8.0, 9.0, 10.0]})
    assert row(page(found).markdown(), "35 M", DECODE, OURS, "OpenVINO batching").endswith(
        "| 1.00 [1.00, 1.50] |  |  |"
    )


def test_engines_that_answer_differently_are_named() -> None:
    found = comparison(turnout=[12.0], OpenVINO=[10.0])
    found.subjects["35 M"][0].agreement = {"turnout": 1.0, "OpenVINO": 0.5}
    assert "at least: OpenVINO 50%; others: all" in page(found).markdown()


def test_a_failure_and_a_disturbance_are_printed() -> None:
    found = comparison(turnout=[12.0])
    [outcome] = found.subjects["35 M"]
    outcome.failures[OPENVINO] = "loading: no memory"
    outcome.foreign_cpu = 0.5
    text = page(found).markdown()
    assert "OpenVINO failed at decode, batch 1: loading: no memory" in text
    assert "| 12 [12, 12] | failed |" in text
    assert "disturbs a measurement: decode, batch 1" in text
    outcome.foreign_cpu = 0.05
    assert "disturbs" not in page(found).markdown()


def test_every_goal_names_work_that_is_done_and_an_engine_that_does_it() -> None:
    work = {workload.name: names for workload, names in random_model_work().items()}
    for target in TARGETS:
        assert target.against is None or target.against in work[target.workload]
        assert OURS in work[target.workload]
    everyone = [*work.values(), *pair_work([[1]], 1).values(), *real_text_work({1: [[1]]}, {1: 1}, 1).values()]
    assert {name for names in everyone for name in names} == set(SIDES)


def test_results_are_saved_with_every_round(tmp_path: Path) -> None:
    page(comparison(turnout=[12.0, 9.0, 10.0], OpenVINO=[10.0, 10.0, 10.0])).save(tmp_path / "peers.md")
    saved = json.loads((tmp_path / "peers.json").read_text())
    assert saved["subjects"]["35 M"][0]["values"]["turnout"] == [12.0, 9.0, 10.0]
    met = {verdict["against"]: verdict["met"] for verdict in saved["verdicts"]}
    assert met == {"OpenVINO": "yes", "generate": "not measured"}
    assert (tmp_path / "peers.md").read_text().startswith("# Turnout compared with other engines")


def test_pages_of_machines_stand_side_by_side(tmp_path: Path) -> None:
    assert overview(tmp_path) == ""
    page(comparison(turnout=[12.0], OpenVINO=[10.0])).save(page_of(tmp_path, "AVX-512 BF16"))
    page(comparison(turnout=[8.0], OpenVINO=[10.0])).save(page_of(tmp_path, "AVX2"))
    lines = overview(tmp_path).splitlines()
    assert "| model | work | ours | over | peers-avx2 | peers-avx512-bf16 |" in lines
    [row] = [line for line in lines if "| OpenVINO |" in line]
    assert [cell.split(" ")[0] for cell in row.strip("| ").split(" | ")[-2:]] == ["0.80", "1.20"]
    assert "not measured" not in "".join(lines)


def test_the_page_of_all_machines_is_what_their_pages_say() -> None:
    results = Path(__file__).parents[2] / "docs" / "results"
    assert (results / "peers.md").read_text(encoding="utf-8") == overview(results)


@pytest.mark.parametrize("name", sorted(SIDES))
def test_every_side_is_a_module_with_an_engine(name: str) -> None:
    from importlib import import_module

    engine = import_module(f"benchmarks.peers.{SIDES[name].module}").Engine
    assert all(callable(getattr(engine, call)) for call in ("missing", "versions", "setup", "generate", "close"))
