"""Figures and the page, from cells written by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.grid.contenders import contenders
from experiments.speculation.bench import Report
from experiments.speculation.cells import Cell, Plan
from experiments.speculation.grid import ASSISTED, Grid, Setting
from experiments.speculation.page import as_dict, page_name, save, to_markdown, verdict
from experiments.speculation.summary import ALL, figures, speedup
from experiments.speculation.tasks import GROUPS
from experiments.stats.intervals import Interval
from turnout.cost import SpeculationMeter

TABLE = contenders()
SHARED: dict[str, Any] = {"dtype": "float32", "threads": 1, "parameters": {"small": 5e5, "large": 2e8}}


def meter(rounds: int, accepted: int, empty: int = 0) -> SpeculationMeter:
    """Rounds of four tokens each of which so many were accepted, and some without a draft."""
    found = SpeculationMeter()
    for each in range(rounds + empty):
        depths = [0, 1, 2, 3] if each < rounds else []
        kept = accepted if depths else 0
        found.add_round(depths=depths, num_accepted=kept, num_emitted=kept + 1, draft_s=1.0, verify_s=3.0)
    return found


def cell(name: str, group: str = "edit", seconds: float = 1.0, baseline: str = "plain", **changes: Any) -> Cell:
    """Two prompts: two seconds of the baseline against so many of the challenger."""
    temperature, batch = changes.pop("temperature", 0.0), changes.pop("batch", 1)
    plan = Plan(name, baseline, group, temperature, batch, {"dtype": "float32"})
    values: dict[str, Any] = {
        "turns": [(2.0, 10, seconds, 10)] * 2,
        "turns_once": 40,
        "speculation": meter(8, 2),
        "target_steps": 8,
        "target_tokens": 35.0,
        "equality": {"equal": 2, "ties": 0, "wrong": 0, "unlike": 0},
        "num_answers": 2,
        "agreement": 1.0,
        "load_average": 0.5,
    }
    return Cell(plan, **{**values, **changes})


def report(*cells: Cell) -> Report:
    grid = Grid(None, None, Setting("demo"), TABLE, {"medusa": "no artifact"}, shared=SHARED)  # type: ignore[arg-type]
    return Report(grid, list(cells), 100)


def test_each_target_has_a_page_of_its_own(tmp_path: Path) -> None:
    found = report(cell("copyspec"))
    save(found, tmp_path)
    found.grid.setting = Setting("widened")
    save(found, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"speculation{end}.{kind}" for end in ("", "-demo") for kind in ("md", "json", "png")}
    assert "](speculation-demo.png)" in (tmp_path / "speculation-demo.md").read_text(encoding="utf-8")


def test_what_was_measured_on_a_gpu_has_a_page_of_its_own() -> None:
    assert page_name(Setting("widened", device="cuda:0")) == "speculation-cuda-0"
    assert page_name(Setting("some/demo", device="cuda")) == "speculation-demo-cuda"


def test_what_was_measured_without_greedy_decoding_has_a_page_of_its_own(tmp_path: Path) -> None:
    """The page that the greedy goals are judged on stays as it is."""
    save(report(cell("copyspec", temperature=1.0)), tmp_path)
    page = (tmp_path / "speculation-demo-t1.md").read_text(encoding="utf-8")
    assert "](speculation-demo-t1.png)" in page
    assert "which is not on this page" in page
    assert "| edit, over plain decoding |" not in page
    both = report(cell("copyspec"), cell("copyspec", temperature=1.0))
    save(both, tmp_path)
    assert "| edit, over plain decoding |" in (tmp_path / "speculation-demo.md").read_text(encoding="utf-8")


def test_goals_of_a_large_target_are_marked_beside_a_small_one() -> None:
    found = report(cell("copyspec"))
    assert "for a target of 200 M" not in to_markdown(found)
    found.grid.shared = {**SHARED, "parameters": {"small": 5e5, "large": 6e6}}
    assert "for a target of 200 M" in to_markdown(found)


def test_a_speedup_is_a_ratio_of_rates_over_all_turns() -> None:
    turns = np.array([[2.0, 10, 1.0, 10], [4.0, 20, 2.0, 20]])
    assert speedup(turns) == Interval(2.0, 2.0, 2.0)
    # 30 tokens in 6 s beside 24 in 2 s: 12 over 5 tokens a second.
    uneven = speedup(np.array([[2.0, 10, 1.0, 10], [4.0, 20, 1.0, 14]]))
    assert uneven.value == pytest.approx(2.4)
    assert (uneven.low, uneven.high) == pytest.approx((2.0, 2.8))


def test_figures_add_up_over_groups() -> None:
    both = figures(
        [cell("copyspec"), cell("copyspec", "code", 4.0, speculation=meter(2, 4, empty=10))], TABLE["copyspec"]
    )
    assert (both.group, both.answers) == (ALL, 4)
    assert both.speedup.value == pytest.approx(8.0 / 10.0)
    assert both.acceptance == (8 * 2 + 2 * 4) / (10 * 4)
    assert both.by_depth == (1.0, 1.0, 0.2, 0.2)
    assert both.draft_share == pytest.approx(0.25)
    assert both.undrafted == pytest.approx(10 / 20)
    assert both.tokens_per_step == 40 / 16
    assert both.fed_per_token == 70 / 40


@pytest.mark.parametrize(
    ("name", "temperature", "words"),
    [
        ("copyspec", 0.0, "1 equal, 1 ties"),
        ("copyspec", 1.0, "1 equal, 1 ties"),
        ("rsd_s", 0.0, "1 equal, 1 ties"),
        ("rsd_s", 1.0, "in law"),
        ("model_chain+typical", 0.0, "own law"),
    ],
)
def test_what_a_verifier_promises_decides_how_equality_is_read(name: str, temperature: float, words: str) -> None:
    found = cell(name, temperature=temperature, equality={"equal": 1, "ties": 1, "wrong": 0, "unlike": 0})
    assert figures([found], TABLE[name]).equality == words


def test_a_wrong_answer_is_counted_and_shown() -> None:
    found = cell("copyspec", equality={"equal": 1, "ties": 0, "wrong": 1, "unlike": 0})
    assert figures([found], TABLE["copyspec"]).wrong == 1
    page = to_markdown(report(found))
    assert "1 equal, 1 WRONG" in page
    assert "Wrong answers: 1." in page


def test_the_verdict_names_the_best_and_the_worst_text() -> None:
    found = report(cell("copyspec"), cell("copyspec", "code", 2.0), cell("copyspec", "passage", 4.0))
    assert verdict("copyspec", found.figures(0.0, 1)["copyspec"]) == (
        "`copyspec`: best on edit (2.00), worst on passage (0.50); wins on edit, loses on passage"
    )


@pytest.fixture
def only_ucb(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were no other contenders that choose by themselves."""
    few = {name: TABLE[name] for name in ("plain", "copyspec", "ucb+smartspec")}
    monkeypatch.setattr("experiments.grid.contenders.contenders", lambda: few)


NAME = "`ucb+smartspec`"
FIRST = "greedy, one prompt at a time"


def every_cell(name: str) -> list[Cell]:
    conditions = itertools.product((0.0, 1.0), (1, 8), GROUPS)
    return [cell(name, group, temperature=temperature, batch=batch) for temperature, batch, group in conditions]


@pytest.mark.usefixtures("only_ucb")
def test_automatic_control_is_judged_by_its_worst_text() -> None:
    cells = every_cell("ucb+smartspec")
    code = cell("ucb+smartspec", "code").plan
    slow = [replace(each, turns=[(2.0, 10, 2.2, 10)] * 2) for each in cells if each.plan == code]
    fine = to_markdown(report(*cells))
    assert f"| the worst of 24 cells | 2.00 [2.00, 2.00] {NAME} on edit, {FIRST} | 0.95 | yes |" in fine
    assert f"| {NAME} | {FIRST} | 2.00 [2.00, 2.00] | edit 2.00 [2.00, 2.00] | 0% | yes |" in fine
    assert "0 of 24 measured cells are below 0.95, 0 of them with the whole interval." in fine
    page = to_markdown(report(*[each for each in cells if each.plan != slow[0].plan], *slow))
    assert f"| the worst of 24 cells | 0.91 [0.91, 0.91] {NAME} on code, {FIRST} | 0.95 | no |" in page
    assert "1 of 24 measured cells are below 0.95, 1 of them with the whole interval." in page
    assert "| code 0.91 [0.91, 0.91] | 0% | no |" in page


@pytest.mark.usefixtures("only_ucb")
def test_what_was_not_measured_is_not_proved() -> None:
    lacking_one = to_markdown(report(*every_cell("ucb+smartspec")[:-1]))
    assert "| the worst of 24 cells, 1 of them not measured | 2.00 [2.00, 2.00] `ucb+smartspec`" in lacking_one
    assert "one prompt at a time | 0.95 | no |" in lacking_one
    assert "edit 2.00 [2.00, 2.00], 1 not measured | 0% | no |" in lacking_one
    page = to_markdown(report(cell("copyspec")))
    assert "| the worst of 24 cells, 24 of them not measured | not measured | 0.95 | no |" in page
    assert page.count("| not measured | | | no |") == 1
    absent = "greedy, 8 prompts at once; temperature 1, one prompt at a time; temperature 1, 8 prompts at once"
    assert f"Nothing was measured of: {absent}." in page


@pytest.mark.usefixtures("only_ucb")
def test_who_may_be_below_the_goal_by_chance_is_told_from_who_is() -> None:
    """One turn that was much slower among ten alike; and plain decoding's own spread stands beside it."""
    unlucky = replace(every_cell("ucb+smartspec")[0], turns=[*[(2.0, 10, 2.0, 10)] * 9, (2.0, 10, 4.0, 10)])
    again = [cell("plain", "edit", 2.1), cell("plain", "code", 1.9)]
    page = to_markdown(report(*every_cell("ucb+smartspec")[1:], unlucky, *again))
    assert "1 of 24 measured cells are below 0.95, 0 of them with the whole interval." in page
    assert "2 cells of plain decoding over itself: 0.95 to 1.05." in page


def test_everybody_who_may_abstain_is_judged() -> None:
    page = to_markdown(report(cell("copyspec")))
    for name in ("ucb+smartspec", "model_chain+smartspec", "medusa+smartspec", "model_chain+thompson"):
        assert f"| `{name}` | greedy, one prompt at a time | not measured |" in page
    assert "| `model_chain+svip` |" not in page


def test_policies_that_always_draft_are_named_with_their_worst_cell() -> None:
    slow = replace(cell("model_chain+svip", "code"), turns=[(2.0, 10, 4.0, 10)] * 2)
    page = to_markdown(report(cell("model_chain+svip", "edit"), slow, cell("model_chain+thompson", "edit")))
    said = next(line for line in page.splitlines() if line.startswith("Not in it, for no length policy"))
    assert "`model_chain+svip`" in said
    assert "`model_chain+thompson`" not in said
    assert "0.50 [0.50, 0.50], `model_chain+svip` on code, greedy, one prompt at a time; 1 of 2 are below 0.95" in said


def test_goals_are_judged_by_the_best_lossless_method_and_name_it() -> None:
    found = report(
        cell("copyspec", "edit", 0.75),
        cell("model_chain", "edit", 1.0),
        cell("model_chain+typical", "edit", 0.5),
        cell("model_chain", "code", 1.3),
        cell("model_chain", "edit", 1.6, baseline=ASSISTED),
    )
    page = to_markdown(found)
    assert "| edit, over plain decoding | 2.67 [2.67, 2.67] `copyspec` | 2.5 | yes |" in page
    assert "| code, over plain decoding | 1.54 [1.54, 1.54] `model_chain` | 1.6 | no |" in page
    assert "| arithmetic, over plain decoding | not measured | 1.6 | no |" in page
    assert "with `assistant_model` | 1.25 [1.25, 1.25] `model_chain` | 1.3 | no |" in page


def test_who_is_chosen_on_one_half_of_the_prompts_is_judged_on_the_other() -> None:
    """The fastest of many is so by luck, too: what it owes to it does not come again."""
    lucky = cell("copyspec", turns=[(2.0, 10, 0.5, 10), (2.0, 10, 2.0, 10)] * 5)
    steady = cell("model_chain", turns=[(2.0, 10, 1.0, 10)] * 10)
    page = to_markdown(report(lucky, steady))
    assert "| edit, over plain decoding | 1.00 [1.00, 1.00] `copyspec` | 2.5 | no |" in page
    halves = figures([lucky], TABLE["copyspec"]).halves
    assert (halves[0].value, halves[1].value) == (4.0, 1.0)
    again = cell("copyspec", turns=[(2.0, 10, 0.5, 10), (2.0, 10, 2.0, 10), (2.0, 10, 0.5, 10)] * 2, turns_once=3)
    assert [half.value for half in figures([again], TABLE["copyspec"]).halves] == [4.0, 1.0]
    alone = figures([cell("copyspec", turns=[(2.0, 10, 1.0, 10)])], TABLE["copyspec"])
    assert alone.halves == (alone.speedup, alone.speedup)


def test_the_page_has_a_table_for_each_condition_and_says_what_did_not_run(tmp_path: Path) -> None:
    found = report(
        cell("plain"), cell("copyspec"), cell("copyspec", temperature=1.0), cell("model_chain", baseline=ASSISTED)
    )
    save(found, tmp_path)
    page = (tmp_path / "speculation-demo.md").read_text(encoding="utf-8")
    assert page.index("## Greedy, one prompt at a time") < page.index("## Temperature 1, one prompt at a time")
    assert "| `copyspec` | 2.00 [2.00, 2.00] | 2.00 | 2.50 | 1.75 | 50% | 25% | 2 equal |" in page
    assert f"| model_chain over {ASSISTED} | 2.00 [2.00, 2.00] | 2.00 | 5 | 2 of 2 |" in page
    assert "- `medusa`: no artifact" in page
    assert "`plain`: best" not in page
    assert (tmp_path / "speculation-demo.png").stat().st_size > 1000
    assert as_dict(found)["cells"] == {"measured": 4, "of": 100}
