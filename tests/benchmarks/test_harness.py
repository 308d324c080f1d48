"""The harness of the benchmarks on planted numbers: turns, ratios, goals, pages and the command line."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from benchmarks.harness import (
    Goal,
    Report,
    Side,
    blocking,
    command_line,
    compare,
    parse,
    run,
    shown,
    take_turns,
    turn_order,
)
from experiments.stats.intervals import Interval


@dataclass(frozen=True)
class Row:
    name: str
    ratio: Interval


def planted(name: str, values: list[float], log: list[str] | None = None) -> Side[float]:
    async def turn(number: int) -> float:
        if log is not None:
            log.append(f"{name}{number}")
        return values[number]

    return Side(name, turn)


async def test_sides_take_turns_and_each_round_begins_with_the_next() -> None:
    log: list[str] = []

    async def before(number: int) -> None:
        log.append(f"before {number}")

    await take_turns([planted(name, [1.0] * 3, log) for name in "abc"], 2, before)
    assert log == ["before 0", "a0", "b0", "c0", "before 1", "b1", "c1", "a1", "before 2", "c2", "a2", "b2"]
    assert list(turn_order([], 3)) == []


async def test_a_side_that_is_new_in_each_round_needs_no_warm_up() -> None:
    log: list[str] = []
    turns = await take_turns([planted("a", [1.0, 2.0, 3.0], log)], 2, warm_up=False)
    assert (log, turns.readings) == (["a1", "a2"], {"a": [2.0, 3.0]})


async def test_the_warm_up_is_dropped_and_ratios_are_of_one_round() -> None:
    ours = iter([900.0, 2.0, 4.0, 100.0])
    sides = [planted("plain", [500.0, 1.0, 1.0, 10.0]), Side("ours", blocking(lambda: next(ours)))]
    turns = await take_turns(sides, 3)
    assert turns.readings == {"plain": [1.0, 1.0, 10.0], "ours": [2.0, 4.0, 100.0]}
    assert turns.spread("plain") == Interval(1.0, 1.0, 10.0)
    # Of the medians it would be 4.
    assert turns.ratio("ours", "plain") == Interval(4.0, 2.0, 10.0)
    assert turns.ratio("plain", "ours", lambda value: 1 / value) == Interval(4.0, 2.0, 10.0)
    assert turns.compared("ours", "plain", lambda mine, theirs: mine - theirs) == [1.0, 3.0, 90.0]


async def test_a_side_that_may_fail_leaves_and_any_other_failure_ends_it() -> None:
    def broken() -> float:
        raise OSError("no model")

    sides = [planted("a", [9.0, 1.0, 2.0]), Side("b", blocking(broken))]
    turns = await take_turns(sides, 2, may_fail=(OSError,))
    assert (turns.readings, turns.failures) == ({"a": [1.0, 2.0]}, {"b": "no model"})
    with pytest.raises(OSError, match="no model"):
        await take_turns(sides, 2)


async def test_two_sides_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="a name of its own"):
        await take_turns([planted("a", [1.0]), planted("a", [1.0])], 0)


@pytest.mark.parametrize(
    ("goal", "interval", "met", "surely"),
    [
        (Goal(1.0), Interval(1.0, 1.0, 2.0), "yes", "yes"),
        (Goal(1.0), Interval(1.5, 0.9, 2.0), "yes", "open"),
        (Goal(1.0), Interval(0.9, 0.8, 0.95), "no", "no"),
        (Goal(0.02, at_most=True), Interval(0.01, -0.01, 0.02), "yes", "yes"),
        (Goal(0.02, at_most=True), Interval(0.03, 0.01, 0.04), "no", "open"),
    ],
)
def test_a_goal_is_met_by_the_median_and_surely_by_the_interval(
    goal: Goal, interval: Interval, met: str, surely: str
) -> None:
    assert (goal.met(interval), goal.surely_met(interval)) == (met, surely)
    assert goal.met(interval.value) == met


def test_figures_are_written_with_their_ends() -> None:
    assert shown(Interval(0.0123, 0.01, 0.02), 1, 100, "%") == "1.2% [1.0, 2.0]"
    assert shown(Interval(1234.4, 1000, 1500)) == "1,234 [1,000, 1,500]"
    assert shown(0.5, 2) == "0.50"


async def test_a_comparison_is_of_the_second_side_over_the_first() -> None:
    free, bound = planted("free", [9.0, 1000.0, 2000.0]), planted("bound", [9.0, 500.0, 3000.0])
    row = await compare({"model": "tiny", "requests": 8}, (free, bound), 2, Goal(1.2))
    assert row.ratio == Interval(1.0, 0.5, 1.5)
    report = Report("t", "how")
    report.comparisons("rows", [row, replace(row, goal=None)], "tokens/s")
    figures = "| tiny | 8 | 1,500 [1,000, 2,000] | 1,750 [500, 3,000] | 1.00 [0.50, 1.50] |"
    assert "| model | requests | free, tokens/s | bound, tokens/s | ratio | goal | met |" in report.markdown()
    assert f"{figures} 1.2 | no |\n{figures}  |  |" in report.markdown()
    assert report.values["rows"][0]["goal"] == {"value": 1.2, "at_most": False}


def report_of(rows: list[Row]) -> Report:
    report = Report("Speed", "`make bench`; planted.")
    report.section("Ratios")
    report.table("rows", rows, {"name": lambda row: row.name, "ratio": lambda row: shown(row.ratio, 2)})
    report.text("The end.")
    return report


def test_a_page_has_its_machine_and_tables_and_the_json_has_the_rows(tmp_path: Path) -> None:
    rows = [Row("a", Interval(1.0, 0.5, 2.0)), Row("b", Interval(3.0, 3.0, 3.0))]
    report = run(
        command_line("Speed.", tmp_path / "unused.md"), lambda _: report_of(rows), ["--out", str(tmp_path / "r.md")]
    )
    page = (tmp_path / "r.md").read_text()
    assert page == report.markdown()
    assert "\n\nMachine: processor " in page
    assert (
        "## Ratios\n\n| name | ratio |\n| --- | ---: |\n| a | 1.00 [0.50, 2.00] |\n| b | 3.00 [3.00, 3.00] |\n" in page
    )
    assert page.endswith("\n\nThe end.\n")
    values = json.loads((tmp_path / "r.json").read_text())
    assert values["rows"][0] == {"name": "a", "ratio": {"value": 1.0, "low": 0.5, "high": 2.0}}
    assert values["machine"]["cores"]
    assert values["options"] == {"rounds": 5, "quick": False}


def test_failures_are_the_exit_status_and_the_page_is_saved_with_its_picture(tmp_path: Path) -> None:
    report = report_of([])
    report.picture("ratios", lambda path: path.write_bytes(b"drawn") and None)
    report.facts({"verdict": "lost"})
    report.failures += ["2 answers are wrong", "1 is lost"]
    with pytest.raises(SystemExit, match="2 answers are wrong; 1 is lost"):
        run(command_line("Speed.", tmp_path / "page.md", rounds=None), lambda _: report, [])
    assert "![ratios](page.png)\n\n|  |   |\n| --- | --- |\n| verdict | lost |" in (tmp_path / "page.md").read_text()
    assert (tmp_path / "page.png").read_bytes() == b"drawn"
    assert json.loads((tmp_path / "page.json").read_text())["options"] == {"quick": False}


def test_cells_without_a_value_are_empty() -> None:
    report = Report("t", "how")
    report.table(None, [], {"n": str, "goal": str})
    assert report.markdown().endswith("\n\n| n | goal |\n| --- | --- |\n")
    report.table("rows", [1, 2], {"n": lambda row: row, "goal": lambda row: None if row == 1 else 0.5})
    assert "| 1 |  |\n| 2 | 0.500 |" in report.markdown()


@pytest.mark.parametrize(
    ("arguments", "rounds", "tokens", "out"),
    [
        ([], 7, 64, "page.md"),
        (["--quick"], 1, 8, None),
        (["--quick", "--rounds", "3"], 3, 8, None),
        (["--quick", "--out", "x.md"], 1, 8, "x.md"),
        (["--no-write"], 7, 64, None),
        (["--device", "cuda:0"], 7, 64, "page-cuda-0.md"),
    ],
)
def test_the_command_line(arguments: list[str], rounds: int, tokens: int, out: str | None) -> None:
    parser = command_line("Speed.", Path("page.md"), rounds=7, tokens=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    options = parse(parser, arguments)
    assert (options.rounds, options.tokens, options.out) == (rounds, tokens, None if out is None else Path(out))


def test_a_run_may_be_asynchronous(capsys: pytest.CaptureFixture[str]) -> None:
    async def measure(options: Namespace) -> Report:
        return report_of([Row("a", Interval(float(options.rounds), 0, 9))])

    run(command_line("Speed.", Path("never.md")), measure, ["--quick"])
    assert "| a | 1.00 [0.00, 9.00] |" in capsys.readouterr().out
    assert not Path("never.md").exists()
