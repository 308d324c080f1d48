"""The page of results, and its numbers as plain data."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.grid.contenders import PLAIN, Family, automatic_names, contenders
from experiments.machine import describe, one_line
from experiments.speculation.bench import Report
from experiments.speculation.grid import PANEL, READING_SLOWDOWN, WIDENED, Axes, Setting
from experiments.speculation.summary import Figures
from experiments.speculation.tasks import GROUPS
from experiments.stats.intervals import Interval

NAME = "speculation"
GOAL = 0.95  # of plain decoding's speed, at least, for a method that chooses by itself how much to draft
# Over plain decoding, of the best method, greedily and one prompt at a time, by kind of text; and of ours over theirs.
BEST_GOALS = {"edit": 2.5, "code": 1.6, "arithmetic": 1.6}
LEAST_PARAMETERS = 200e6
PEER_GOAL = 1.3
PEERS_WITH_GOAL = ("assistant_model", "prompt_lookup_num_tokens")
# The cells that a goal for all of them is about.
WANTED = Axes((), tuple(GROUPS))
DEPTHS = 6
ByGroup = dict[str, Figures]


def save(report: Report, folder: Path) -> None:
    """Write the page, the plot and the numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    name = _name(report)
    (folder / f"{name}.md").write_text(to_markdown(report), encoding="utf-8")
    (folder / f"{name}.json").write_text(json.dumps(as_dict(report), indent=1) + "\n", encoding="utf-8")
    plot(report, folder / f"{name}.png")


def page_name(setting: Setting, only_at: Iterable[float] = ()) -> str:
    """What the files are called: the widened target's on the CPU have the plain name, for the goals are about it.

    Args:
        setting: that all cells share.
        only_at: temperatures of a page that has nothing greedy, and so nothing of most goals.
    """
    target = [] if setting.target == WIDENED else [Path(setting.target).name]
    device = [] if setting.device == "cpu" else [setting.device.replace(":", "-")]
    return "-".join([NAME, *target, *device, *(f"t{temperature:g}" for temperature in only_at)])


def _name(report: Report) -> str:
    return page_name(report.grid.setting, _only_at(report))


def _only_at(report: Report) -> list[float]:
    """Temperatures that were measured where greedy decoding was not; empty where it was."""
    measured = list(dict.fromkeys(temperature for temperature, _ in report.conditions()))
    return [] if 0.0 in measured else measured


def as_dict(report: Report) -> dict[str, Any]:
    """Everything measured, as plain data."""
    found = [report.figures(*condition) for condition in report.conditions()]
    return {
        "setting": report.grid.shared | {"target": report.grid.setting.target, "prompts": report.grid.setting.prompts},
        "cells": {"measured": len(report.cells), "of": report.wanted},
        "not run": report.grid.missing,
        "figures": [each.as_dict() for by_name in found for mine in by_name.values() for each in mine.values()],
        "peers": [each.as_dict() for mine in report.peers().values() for each in mine.values()],
    }


def to_markdown(report: Report) -> str:
    """The page."""
    lines = [*_heading(report)]
    for temperature, batch in report.conditions():
        found = report.figures(temperature, batch)
        lines += ["", f"## {condition(temperature, batch)}", "", *_table(report, found)]
    first = report.figures(*report.conditions()[0]) if report.conditions() else {}
    lines += ["", "## Goals", "", *_goals(report)]
    lines += ["", "## Where each wins and where it loses", "", *_verdicts(report, first)]
    lines += ["", "## Acceptance by depth", "", *_depths(report, first)]
    lines += ["", "## Automatic control of the draft's length", "", *_automatic(report)]
    lines += ["", "## Compared with Hugging Face `generate`", "", *_peers(report)]
    if report.grid.missing:
        lines += ["", "## Not run", "", *(f"- `{name}`: {why}" for name, why in report.grid.missing.items())]
    return "\n".join([*lines, "", f"![speed-up by method and kind of text]({_name(report)}.png)", ""])


def condition(temperature: float, batch: int) -> str:
    """A temperature and a batch size in words."""
    kind = "Greedy" if temperature == 0.0 else f"Temperature {temperature:g}"
    return f"{kind}, {'one prompt at a time' if batch == 1 else f'{batch} prompts at once'}"


def _heading(report: Report) -> list[str]:
    shared, setting = report.grid.shared, report.grid.setting
    loads = [cell.load_average for cell in report.cells]
    sizes = {role: f"{count / 1e6:.1f} M" for role, count in shared["parameters"].items()}
    stand_in = (
        " The target is the demo's large model with idle units in every MLP: it writes the same text at the cost of a"
        " larger model, and leaving layers out spoils it as before."
    )
    return [
        f"# Speculative methods and plain decoding (target {setting.target}, {sizes['large']} parameters)",
        "",
        f"`make bench-speculation`; {one_line(describe(setting.device))}; load average while measuring"
        f" {min(loads, default=0):.1f} to {max(loads, default=0):.1f}. {shared['dtype']}, {shared['threads']} threads;"
        f" draft model {sizes['small']}.{stand_in if setting.target == 'widened' else ''} {setting.prompts} prompts of"
        f" each kind, answers of at most {setting.max_tokens} tokens. Plain decoding and up to"
        f" {PANEL} methods answer each prompt in turns, in an order that rotates, in one process and engine, after a"
        f" warm-up on other prompts; where that makes fewer than {setting.turns} turns, all are asked again, with"
        " everything learned forgotten. Prompts that come together are read quickly (`engine.max_slowdown`"
        f" {READING_SLOWDOWN:g}), so that all of their answers are decoded together.",
        "",
        "Numbers under the texts are tokens per second over plain decoding's, reading the prompt included [95%"
        " interval, bootstrap over turns, pairs together, and those that ask the same prompts again counted as others]."
        " *Tokens* are emitted tokens of one"
        " forward of the target; *fed* are tokens that went through the target for each emitted one, the prompt's left"
        " out, and half of one where it went through half of the layers; *kept* is the share of drafted tokens that"
        " stayed; *drafting* its share of the time."
        " *Text*: answers equal to plain decoding's in the same run; ties are first differences that rounding explains"
        " (see `experiments/speculation/equality.py`); *in law*: drawn from the same distribution, not compared.",
        "",
        f"{len(report.cells)} of {report.wanted} cells are measured. Wrong answers: {report.wrong}.",
    ]


def _groups(found: ByGroup) -> ByGroup:
    return {group: each for group, each in found.items() if group}


def _group_names(found: dict[str, ByGroup]) -> list[str]:
    return list(dict.fromkeys(group for mine in found.values() for group in _groups(mine)))


def _table(report: Report, found: dict[str, ByGroup]) -> list[str]:
    groups = _group_names(found)
    lines = [
        f"| method | all | {' | '.join(groups)} | tokens | fed | kept | drafting | text |",
        f"| --- | --- | {'--- | ' * len(groups)}--- | --- | --- | --- | --- |",
    ]
    for name, mine in sorted(found.items(), key=lambda item: -item[1][""].speedup.value):
        whole = mine[""]
        cells = [f"{mine[group].speedup.value:.2f}" if group in mine else "" for group in groups]
        lines.append(
            f"| `{name}` | {interval(whole.speedup)} | {' | '.join(cells)} | {whole.tokens_per_step:.2f}"
            f" | {whole.fed_per_token:.2f} | {whole.acceptance:.0%} | {whole.draft_share:.0%} | {whole.equality} |"
        )
    return lines


def interval(found: Interval) -> str:
    """Two digits of each."""
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"


def _verdicts(report: Report, found: dict[str, ByGroup]) -> list[str]:
    ours = {name: mine for name, mine in found.items() if report.grid.contenders[name].params is not None}
    if not ours:
        return ["Nothing was measured."]
    shown = condition(*report.conditions()[0])
    return [
        f"{shown[0]}{shown[1:].lower()}. A method wins or loses where plain decoding's speed is outside the interval.",
        "",
        *(f"- {verdict(name, mine)}" for name, mine in ours.items()),
    ]


def verdict(name: str, found: ByGroup) -> str:
    """Where a method is best and worst, and where it is faster or slower than plain decoding for sure."""
    ranked = sorted(_groups(found).values(), key=lambda each: each.speedup.value)
    worst, best = ranked[0], ranked[-1]
    wins = [each.group for each in reversed(ranked) if each.speedup.low > 1.0]
    loses = [each.group for each in ranked if each.speedup.high < 1.0]
    everywhere = {len(ranked): "everywhere", 0: "nowhere"}
    return (
        f"`{name}`: best on {best.group} ({best.speedup.value:.2f}), worst on {worst.group}"
        f" ({worst.speedup.value:.2f}); wins {everywhere.get(len(wins), 'on ' + ', '.join(wins))},"
        f" loses {everywhere.get(len(loses), 'on ' + ', '.join(loses))}"
    )


def _goals(report: Report) -> list[str]:
    """The best lossless method on the kinds of text that have a goal, and the best of ours over each of theirs."""
    automatic = [
        "| automatic control, over plain decoding | worst | goal | met |",
        "| --- | --- | --- | --- |",
        _worst_goal(report),
    ]
    if _only_at(report):
        return ["Goals for the best method are about greedy decoding, which is not on this page.", "", *automatic]
    said = (
        "The best is chosen on every other prompt, and judged on those between: the fastest of many is so by luck, too."
    )
    lines = [said, "", "| greedy, one prompt at a time | best | goal | met |", "| --- | --- | --- | --- |"]
    found = report.figures(0.0, 1)
    lossless = {name: mine for name, mine in found.items() if report.grid.contenders[name].lossless}
    for group, goal in BEST_GOALS.items():
        measured = {name: mine[group].halves for name, mine in lossless.items() if group in mine and name != PLAIN}
        lines.append(_goal(f"{group}, over plain decoding", measured, goal))
    for peer in PEERS_WITH_GOAL:
        measured = {name: mine[""].halves for name, mine in report.peers().items() if name.endswith(peer)}
        lines.append(_goal(f"all texts, over `generate` with `{peer}`", measured, PEER_GOAL))
    if report.grid.shared["parameters"]["large"] < LEAST_PARAMETERS:
        lines = [
            f"The first three are goals for a target of {LEAST_PARAMETERS / 1e6:.0f} M parameters or more.",
            "",
            *lines,
        ]
    return [*lines, "", *automatic]


def _goal(what: str, measured: dict[str, tuple[Interval, Interval]], goal: float) -> str:
    if not measured:
        return f"| {what} | not measured | {goal:g} | no |"
    best = max(measured, key=lambda name: measured[name][0].value)
    judge = measured[best][1]
    met = "yes" if judge.value >= goal else "no"
    return f"| {what} | {interval(judge)} `{best.partition(' over ')[0]}` | {goal:g} | {met} |"


def _depths(report: Report, found: dict[str, ByGroup]) -> list[str]:
    lines = [
        "Share of the rounds that drafted so deep which accepted so deep, all texts, first table's conditions.",
        "",
        f"| method | {' | '.join(map(str, range(1, DEPTHS + 1)))} |",
        f"| --- | {'--- | ' * DEPTHS}".rstrip(),
    ]
    for name, mine in found.items():
        shares = [f"{share:.0%}" for share in mine[""].by_depth[:DEPTHS]]
        if shares:
            lines.append(f"| `{name}` | {' | '.join(shares + [''] * (DEPTHS - len(shares)))} |")
    return lines


def _worst_goal(report: Report) -> str:
    """The cell in which a method that chooses by itself was slowest; nothing is met while a cell is missing."""
    found, missing = _automatic_cells(report)
    what = f"the worst of {len(found) + len(missing)} cells"
    if missing:
        what += f", {len(missing)} of them not measured"
    if not found:
        return f"| {what} | not measured | {GOAL:g} | no |"
    worst = min(found, key=lambda each: each.speedup.value)
    where = f"`{worst.contender}` on {worst.group}, {condition(worst.temperature, worst.batch).lower()}"
    met = "yes" if worst.speedup.value >= GOAL and not missing else "no"
    return f"| {what} | {interval(worst.speedup)} {where} | {GOAL:g} | {met} |"


def _automatic_cells(report: Report) -> tuple[list[Figures], list[tuple[str, float, int, str]]]:
    """What is measured, and what is not, of every lossless method that may choose to draft nothing."""
    found, missing = [], []
    for name in automatic_names():
        for temperature, batch in itertools.product(WANTED.temperatures, WANTED.batches):
            mine = report.figures(temperature, batch).get(name, {})
            for group in WANTED.groups:
                if group in mine:
                    found.append(mine[group])
                else:
                    missing.append((name, temperature, batch, group))
    return found, missing


def _automatic(report: Report) -> list[str]:
    lines = [
        f"Who chooses by itself how much is drafted, nothing included, should never be slower than {GOAL:g} of plain"
        " decoding. *Undrafted*: share of rounds in which it drafted nothing.",
        "",
        "| method | conditions | all | worst text | undrafted | met |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    _, missing = _automatic_cells(report)
    wanted = list(itertools.product(WANTED.temperatures, WANTED.batches))
    absent = [condition(*each).lower() for each in wanted if each not in report.conditions()]
    for temperature, batch in [each for each in wanted if each in report.conditions()]:
        found = report.figures(temperature, batch)
        for name in automatic_names():
            whole = found[name][""] if name in found else None
            words = condition(temperature, batch).lower()
            lacks = sum(each[:3] == (name, temperature, batch) for each in missing)
            if whole is None:
                lines.append(f"| `{name}` | {words} | not measured | | | no |")
                continue
            worst = min(_groups(found[name]).values(), key=lambda each: each.speedup.value)
            met = "yes" if worst.speedup.value >= GOAL and not lacks else "no"
            lines.append(
                f"| `{name}` | {words} | {interval(whole.speedup)} | {worst.group} {interval(worst.speedup)}"
                f"{f', {lacks} not measured' if lacks else ''} | {whole.undrafted:.0%} | {met} |"
            )
    if absent:
        lines += ["", f"Nothing was measured of: {'; '.join(absent)}."]
    return [*lines, "", _below(report), "", _always_drafting(report)]


def _below(report: Report) -> str:
    """Number of cells that miss the goal, and how far plain decoding differs from itself."""
    found, _ = _automatic_cells(report)
    below = [each.speedup for each in found if each.speedup.value < GOAL]
    surely = sum(each.high < GOAL for each in below)
    said = f"{len(below)} of {len(found)} measured cells are below {GOAL:g}, {surely} of them with the whole interval."
    itself = [
        each.speedup.value
        for conditions in report.conditions()
        for each in _groups(report.figures(*conditions).get(PLAIN, {})).values()
    ]
    if not itself:
        return said
    return f"{said} {len(itself)} cells of plain decoding over itself: {min(itself):.2f} to {max(itself):.2f}."


def _always_drafting(report: Report) -> str:
    """What chooses lengths or drafters, and the goal is not about, with its own worst cell."""
    names = [
        name
        for name, each in contenders().items()
        if each.family in (Family.LENGTH, Family.SELECTOR) and not each.automatic and each.lossless
    ]
    cells = [
        figures
        for conditions in report.conditions()
        for name, mine in report.figures(*conditions).items()
        if name in names
        for figures in _groups(mine).values()
    ]
    said = f"Not in it, for no length policy of theirs leaves a draft out: {', '.join(f'`{name}`' for name in names)}."
    if not cells:
        return said
    worst = min(cells, key=lambda each: each.speedup.value)
    where = f"`{worst.contender}` on {worst.group}, {condition(worst.temperature, worst.batch).lower()}"
    below = sum(each.speedup.value < GOAL for each in cells)
    return f"{said} Their worst cell: {interval(worst.speedup)}, {where}; {below} of {len(cells)} are below {GOAL:g}."


def _peers(report: Report) -> list[str]:
    found = report.peers()
    if not found:
        return ["Not measured."]
    groups = _group_names(found)
    lines = [
        "Ours over theirs, tokens per second, the same prompts and weights in turns, greedily, one prompt at a time."
        " *Equal*: answers with the same tokens on both sides; in bfloat16 rounding parts some.",
        "",
        f"| ours over theirs | all | {' | '.join(groups)} | theirs, tokens/s | equal |",
        f"| --- | --- | {'--- | ' * len(groups)}--- | --- |",
    ]
    for name, mine in found.items():
        whole = mine[""]
        cells = [f"{mine[group].speedup.value:.2f}" if group in mine else "" for group in groups]
        lines.append(
            f"| {name} | {interval(whole.speedup)} | {' | '.join(cells)} | {whole.baseline_tokens_per_s:.0f}"
            f" | {whole.equality.removesuffix(' equal')} of {whole.answers} |"
        )
    return lines


def plot(report: Report, path: Path) -> None:
    """A heat map of the first conditions measured, fastest method on top; blue is slower than plain, red faster."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import TwoSlopeNorm

    found = report.figures(*report.conditions()[0])
    names = sorted(found, key=lambda name: -found[name][""].speedup.value)
    groups = list(dict.fromkeys(group for mine in found.values() for group in mine))
    values = np.array(
        [[found[name][group].speedup.value if group in found[name] else np.nan for group in groups] for name in names]
    )
    figure, axes = plt.subplots(figsize=(2 + 0.85 * len(groups), 1.2 + 0.24 * len(names)))
    most = max(float(np.nanmax(values)), 1.01)
    norm = TwoSlopeNorm(1.0, vmin=min(float(np.nanmin(values)), 0.99), vmax=most)
    image = axes.imshow(values, cmap="RdBu_r", norm=norm, aspect="auto")
    for row, column in zip(*np.nonzero(~np.isnan(values)), strict=True):
        axes.text(column, row, f"{values[row, column]:.2f}", ha="center", va="center", fontsize=7)
    axes.set_xticks(range(len(groups)), [group or "all" for group in groups], fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_title("tokens per second over plain decoding", fontsize=9)
    figure.colorbar(image, ax=axes, fraction=0.04)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)
