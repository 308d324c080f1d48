"""The frontier as a page and a picture."""

from __future__ import annotations

import math
from pathlib import Path

from benchmarks.frontier.figures import Figures, Point
from benchmarks.frontier.prompts import LARGE, METERS, SMALL, Prompts
from benchmarks.retention import Goal, judged, percent
from experiments.stats.intervals import Interval

SWITCHING, ROUTER = "entropy_adaptive", "route learned"
MARKERS, COLOURS = "os^D", 10  # of families; matplotlib has so many colours
ORACLE = 0.6  # of what the oracle gains over random choices, that the router is to recover


def to_markdown(found: Figures, prompts: Prompts, machine: str, kept: dict[Goal, Interval]) -> str:
    """The page.

    Args:
        found: the figures.
        prompts: that they are of.
        machine: in words.
        kept: by goal, what `entropy_adaptive` keeps of the large model's quality at its share of tokens.
    """
    names = ", ".join(METERS.values())
    return "\n".join(
        [
            "# Quality against cost",
            "",
            f"`make bench-frontier`; {machine}. {found.num_prompts} held-out prompts, all kinds together; greedy, but"
            " for routes that set a temperature of their own. The two models alone are not equally good at"
            f" {prompts.num_apart} of them; the others tell no ways apart. Costs"
            f" are relative to the large model alone, by three meters ({names}). *Above random*: quality less that of"
            " sending as many prompts, drawn by chance, to the large model as cost the same. *Area*: its mean over all"
            " costs between the two models', along the settings of one way of answering; *of the oracle*: as a part of"
            " what knowing beforehand which model is right would gain. 95% intervals by bootstrap over prompts.",
            "",
            "Large tokens are all that the large model wrote, dropped ones included, per token of the answers. The"
            " paper's cost is of the tokens that were written, samples, steps and answers thrown away included;"
            " speculative drafts are free by it. FLOPs and time count them. Time is that of a request beside"
            " others; each way ran once, so a machine whose speed varies moves it by more than its interval says.",
            "",
            *_left_out(prompts),
            "## Goals",
            "",
            *_verdicts(found, kept),
            "",
            "![Quality against cost](frontier.png)",
            "",
            *_kinds(found),
            "",
            *_families(found),
            "",
            *_points(found.points),
            "",
        ]
    )


def _verdicts(found: Figures, kept: dict[Goal, Interval]) -> list[str]:
    """One line a goal."""
    lines = []
    for goal, value in kept.items():
        said = "no two settings with that share between them" if math.isnan(value.value) else f"{percent(value)} kept"
        lines.append(
            f"- `{SWITCHING}` at {goal.share:.0%} large tokens, of the large model's quality: {said};"
            f" {judged(value, goal.least)}."
        )
    family = next((each for each in found.families if each.name == ROUTER), None)
    part = Interval(math.nan, math.nan, math.nan) if family is None else family.of_oracle["paper"]
    if family is None:
        said = "it has not been run at two settings"
    elif math.isnan(part.value):
        said = "the oracle gains nothing"
    else:
        said = f"{percent(part)} by the paper's cost"
    lines.append(
        f"- `learned`, of what the oracle gains over random choices: {said}; {judged(part, ORACLE, '{:.0%}')}."
    )
    return lines


def _left_out(prompts: Prompts) -> list[str]:
    """What is not in the figures, and why; nothing where all is."""
    lines = []
    if prompts.size < prompts.num_asked:
        failed = ", ".join(f"`{label}` at {count}" for label, count in prompts.failed.items())
        lines += [
            f"Of {prompts.num_asked} prompts {prompts.num_asked - prompts.size} are left out for all ways, because one"
            f" gave no answer or it has no score: {failed}.",
            "",
        ]
    if prompts.left_out:
        lines += ["Not in it:", "", *(f"- `{label}`: {why}" for label, why in prompts.left_out.items()), ""]
    return lines


def _kinds(found: Figures) -> list[str]:
    rows = [
        f"| {name} | {count} | {_rate(small)} | {_rate(large)} |" for name, (count, small, large) in found.kinds.items()
    ]
    return ["| prompts | number | small alone | large alone |", "| --- | --- | --- | --- |", *rows]


def _families(found: Figures) -> list[str]:
    heads = [f"{what}, {name}" for name in METERS.values() for what in ("area", "of the oracle")]
    lines = [f"| way | settings | {' | '.join(heads)} |", f"| --- | --- |{' --- |' * len(heads)}"]
    for family in found.families:
        cells = [cell for meter in METERS for cell in (_gain(family.area[meter]), _part(family.of_oracle[meter]))]
        lines.append(f"| {family.name} | {len(family.labels)} | {' | '.join(cells)} |")
    return lines


def _points(points: list[Point]) -> list[str]:
    heads = [f"{what}, {name}" for name in METERS.values() for what in ("cost", "above random")]
    lines = [
        f"| setting | quality | tokens | large tokens | {' | '.join(heads)} |",
        f"| --- | --- | --- | --- |{' --- |' * len(heads)}",
    ]
    for point in sorted(points, key=lambda each: each.costs["paper"].value):
        cells = [cell for meter in METERS for cell in (_cost(point.costs[meter]), _gain(point.above[meter]))]
        lines.append(
            f"| {point.label} | {_rate(point.quality)} | {point.tokens:.1f} | {point.share:.0%} | {' | '.join(cells)} |"
        )
    return lines


def _rate(value: Interval) -> str:
    return f"{value.value:.1%} [{value.low:.1%}, {value.high:.1%}]"


def _cost(value: Interval) -> str:
    return f"{value.value:.2f} [{value.low:.2f}, {value.high:.2f}]"


def _gain(value: Interval) -> str:
    return "-" if math.isnan(value.value) else f"{value.value:+.3f} [{value.low:+.3f}, {value.high:+.3f}]"


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
