"""The frontier as a page and a picture."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.frontier.figures import Family, Figures, Point
from benchmarks.frontier.prompts import LARGE, METERS, SMALL, Prompts
from benchmarks.harness import Goal, Report, signed
from benchmarks.retention import Retention, judged, percent
from experiments.stats.intervals import Interval

SWITCHING, ROUTER = "entropy_adaptive", "route learned"
MARKERS, COLOURS = "os^D", 10  # of families; matplotlib's number of colours
ORACLE = Goal(0.6)  # of what the oracle gains over random choices, that the router is to recover


def page(found: Figures, prompts: Prompts, kept: dict[Retention, Interval]) -> Report:
    """The report.

    Args:
        found: the figures.
        prompts: that they are of.
        kept: what `entropy_adaptive` keeps of the large model's quality at a share of its tokens.
    """
    report = Report(
        "Quality against cost",
        f"`make bench-frontier`. {found.num_prompts} held-out prompts, all kinds together; greedy, but for routes that"
        " set a temperature of their own. The two models alone are not equally good at"
        f" {prompts.num_apart} of them; the others tell no ways apart. Costs are relative to the large model alone, by"
        f" three meters ({', '.join(METERS.values())}). *Above random*: quality less that of"
        " sending as many prompts, drawn by chance, to the large model as cost the same. *Area*: its mean over all"
        " costs between the two models', along the settings of one way of answering; *of the oracle*: as a part of"
        " what knowing beforehand which model is right would gain. 95% intervals by bootstrap over prompts.",
    )
    report.text(
        "Large tokens are all that the large model wrote, dropped ones included, per token of the answers. The paper's"
        " cost is of the tokens that were written, samples, steps and answers thrown away included; speculative drafts"
        " are free by it. FLOPs and time count them. Time is that of a request next to others; each way ran once, so a"
        " machine whose speed varies moves it by more than its interval says."
    )
    _add_left_out(report, prompts)
    report.section("Goals")
    report.text("\n".join(_verdicts(found, kept)))
    report.picture("Quality against cost", lambda path: plot(found, path))
    kinds = {
        "prompts": lambda row: row[0],
        "number": lambda row: row[1][0],
        "small alone": lambda row: _rate(row[1][1]),
        "large alone": lambda row: _rate(row[1][2]),
    }
    report.table(None, list(found.kinds.items()), kinds)
    _add_families(report, found)
    _add_points(report, found.points)
    report.values |= asdict(found)
    report.values["oracle"] = {meter: [each.tolist() for each in curve] for meter, curve in found.oracle.items()}
    report.values["kept"] = {str(each.share): asdict(value) for each, value in kept.items()}
    report.values |= {"asked": prompts.num_asked, "failed": prompts.failed, "left_out": prompts.left_out}
    return report


def _verdicts(found: Figures, kept: dict[Retention, Interval]) -> list[str]:
    """One line a goal."""
    lines = []
    for wanted, value in kept.items():
        text = "no two settings with that share between them" if math.isnan(value.value) else f"{percent(value)} kept"
        lines.append(
            f"- `{SWITCHING}` at {wanted.share:.0%} large tokens, of the large model's quality: {text};"
            f" {judged(value, wanted.goal)}."
        )
    family = next((each for each in found.families if each.name == ROUTER), None)
    part = Interval(math.nan, math.nan, math.nan) if family is None else family.of_oracle["paper"]
    if family is None:
        text = "it has not been run at two settings"
    elif math.isnan(part.value):
        text = "the oracle gains nothing"
    else:
        text = f"{percent(part)} by the paper's cost"
    lines.append(
        f"- `learned`, of what the oracle gains over random choices: {text}; {judged(part, ORACLE, '{:.0%}')}."
    )
    return lines


def _add_left_out(report: Report, prompts: Prompts) -> None:
    """Say what is not in the figures, and why."""
    if prompts.size < prompts.num_asked:
        failed = ", ".join(f"`{label}` at {count}" for label, count in prompts.failed.items())
        report.text(
            f"Of {prompts.num_asked} prompts {prompts.num_asked - prompts.size} are left out for all ways, because one"
            f" gave no answer or it has no score: {failed}."
        )
    if prompts.left_out:
        report.text("Not in it:")
        report.text("\n".join(f"- `{label}`: {why}" for label, why in prompts.left_out.items()))


def _add_families(report: Report, found: Figures) -> None:
    columns: dict[str, Callable[[Family], Any]] = {
        "way": lambda row: row.name,
        "settings": lambda row: len(row.labels),
    }
    for meter, name in METERS.items():
        columns[f"area, {name}"] = partial(lambda of, row: _gain(row.area[of]), meter)
        columns[f"of the oracle, {name}"] = partial(lambda of, row: _part(row.of_oracle[of]), meter)
    report.table(None, found.families, columns)


def _add_points(report: Report, points: list[Point]) -> None:
    columns: dict[str, Callable[[Point], Any]] = {
        "setting": lambda row: row.label,
        "quality": lambda row: _rate(row.quality),
        "tokens": lambda row: f"{row.tokens:.1f}",
        "large tokens": lambda row: f"{row.share:.0%}",
    }
    for meter, name in METERS.items():
        columns[f"cost, {name}"] = partial(lambda of, row: _cost(row.costs[of]), meter)
        columns[f"above random, {name}"] = partial(lambda of, row: _gain(row.above[of]), meter)
    report.table(None, sorted(points, key=lambda each: each.costs["paper"].value), columns)


def _rate(value: Interval) -> str:
    return f"{value.value:.1%} [{value.low:.1%}, {value.high:.1%}]"


def _cost(value: Interval) -> str:
    return f"{value.value:.2f} [{value.low:.2f}, {value.high:.2f}]"


def _gain(value: Interval) -> str:
    return "-" if math.isnan(value.value) else signed(value)


def _part(value: Interval) -> str:
    return "not reached" if math.isnan(value.value) else f"{value.value:.2f} [{value.low:.2f}, {value.high:.2f}]"


def plot(found: Figures, path: Path) -> None:
    """Quality over cost, one picture a meter: both models, the line of random choices, the oracle, every way."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, pictures = plt.subplots(1, len(METERS), figsize=(15, 5), sharey=True)
    ends = {point.label: point for point in found.points if point.label in (SMALL, LARGE)}
    families = dict.fromkeys(point.family for point in found.points if point.label not in ends)
    for axes, (meter, name) in zip(pictures, METERS.items(), strict=True):
        line = [(ends[label].costs[meter].value, ends[label].quality.value) for label in (SMALL, LARGE)]
        axes.plot(*zip(*line, strict=True), "k--", label="random")
        axes.plot(*found.oracle[meter], ":", color="grey", label="oracle")
        for place, family in enumerate(families):
            mine = [point for point in found.points if point.family == family and point.label not in ends]
            mine.sort(key=lambda point, m=meter: point.costs[m].value)  # type: ignore[misc]
            spread = [[p.quality.value - p.quality.low for p in mine], [p.quality.high - p.quality.value for p in mine]]
            costs, qualities = [p.costs[meter].value for p in mine], [p.quality.value for p in mine]
            mark = MARKERS[place // COLOURS % len(MARKERS)]
            axes.errorbar(costs, qualities, yerr=spread, marker=mark, capsize=2, label=family)
        axes.set_xlabel(f"{name}, large model alone = 1")
        axes.grid(alpha=0.3)
    pictures[0].set_ylabel("quality")
    pictures[-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
