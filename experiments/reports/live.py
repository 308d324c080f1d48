"""The report of a live experiment: a page, text and figures, as of an experiment on data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from experiments.live import (
    METRICS,
    Entry,
    LiveLine,
    LiveRule,
    ShadowLine,
    arms,
    divided,
    of_pool,
    shadows,
)
from experiments.reports.html import filled
from experiments.reports.rows import Cell, Row, Shown, interval_cell, number_cell
from experiments.reports.svg import Axes, Mark, Series, chart
from experiments.reports.text import as_json, table_lines
from experiments.stats.hypotheses import ALPHA
from experiments.stats.power import POWER
from turnout.errors import invalid

TITLE = "live"
UNITS = "sessions, tenants or requests of both arms, in the order they came"
NAMES = {
    "answered": "answered",
    "score": "score",
    "large_share": "large tokens",
    "paper": "paper",
    "flops": "FLOPs",
    "ttft_s": "first token, s",
    "wall_s": "time, s",
}


@dataclass(frozen=True, slots=True)
class LiveReport:
    """Everything a page shows.

    Attributes:
        title: also the name of its files.
        control: arm that others are compared with; "" without.
        rule: when to stop.
        arms: of each pool, the control first.
        shadows: with their requests.
        power: what this number of units or pairs can detect, and what a margin would take.
        ends: of each split that the rule has decided, how its configuration ends it.
        scores: scorers, number of answers, and why others have no score; empty without a scorer.
    """

    title: str
    control: str
    rule: LiveRule
    arms: list[LiveLine]
    shadows: list[ShadowLine]
    power: list[str]
    ends: list[str]
    scores: list[str]


def make_live_report(
    entries: Iterable[Entry], control: str, rule: LiveRule, pool: str = "", scores: Iterable[str] = ()
) -> LiveReport:
    """Work out the figures of a route log.

    Args:
        entries: of one or more files, in any order.
        control: name of the arm that others are compared with; "" leaves splits out.
        rule: when to stop.
        pool: the only one that is looked at; "" looks at all.
        scores: what is to be said of the scores that entries have.

    Raises:
        TurnoutError: NOT_FOUND: no such pool, or a pool without such an arm; INVALID_ARGUMENT: there is nothing to
            compare.
    """
    # Files that were begun anew when they were full are named with the newest first.
    known = sorted(of_pool(entries, pool), key=lambda entry: str(entry.get("time", "")))
    lines = arms(known, control, rule) if control else []
    paired = shadows(known)
    if not lines and not paired:
        split = sorted({arm for by_arm in divided(known).values() for arm in by_arm})
        hint = f"; name one of the arms {', '.join(split)} with --control" if split else ""
        raise invalid("log", f"holds nothing to compare: no shadow with its request, and no arm that is named{hint}")
    title = f"{TITLE}-{pool}" if pool else TITLE
    power = [*_power(lines, rule), *_shadow_power(paired, rule)]
    return LiveReport(title, control, rule, lines, paired, power, list(_ends(lines, control, rule)), list(scores))


def _power(lines: list[LiveLine], rule: LiveRule) -> Iterator[str]:
    controls = {line.pool: line for line in lines if not line.looks}
    for line in lines:
        if not line.looks:
            continue
        comparisons = sum(len(each.p) for each in lines if each.pool == line.pool)
        said = f"{line.pool}, {line.arm}: {line.units} and {controls[line.pool].units} units"
        apart = line.apart.get(rule.metric)
        if apart is None:
            yield f"{said}: {NAMES[rule.metric]} does not vary, so it is not known what they can detect"
            continue
        text = f"{said} tell {apart:.3g} of {NAMES[rule.metric]} apart (power {POWER:.0%}, {comparisons} comparisons)"
        # The difference that can be detected falls with the root of the number.
        times = (apart / rule.margin) ** 2 if rule.margin else 0.0
        yield f"{text}; {rule.margin:g} would take {times:.2g} times as many" if times > 1 else text


def _shadow_power(lines: list[ShadowLine], rule: LiveRule) -> Iterator[str]:
    for line in lines:
        apart = line.apart.get(rule.metric)
        if apart is not None:
            yield (
                f"{line.pool}, shadow {line.policy}: {line.pairs} pairs tell {apart:.3g} of {NAMES[rule.metric]} apart"
                f" (power {POWER:.0%}, {len(line.p)} comparisons)"
            )


def _ends(lines: list[LiveLine], control: str, rule: LiveRule) -> Iterator[str]:
    """What to write into the configuration where the rule says stop; requests that failed have no cost."""
    for line in lines:
        unanswered = f"; but look at what it leaves unanswered first: {line.differences.get('answered')}"
        but = unanswered if _fails(line) else ""
        name, share = f"{line.pool}: {line.arm} is", f"arms.{line.arm}.share"
        if line.verdict == "stop: better":
            yield f"{name} better in {NAMES[rule.metric]}: {share}: 1, and 0 for the others, ends the split{but}"
        elif line.verdict == "stop: worse":
            yield f"{name} worse in {NAMES[rule.metric]}: {share}: 0, and what it had for {control}, ends the arm"


def _fails(line: LiveLine) -> bool:
    """Whether an arm surely leaves more unanswered than the control."""
    answered = line.differences.get("answered")
    return answered is not None and answered.value < 0 and line.p["answered"] < ALPHA


def winner(report: LiveReport) -> str:
    """The arm that the stop rule leaves: one that is better, or the control where all others are worse; "": none yet.

    An arm that leaves more unanswered is not left, however cheap its answers: whether it is, a person decides.

    Raises:
        TurnoutError: INVALID_ARGUMENT: several pools; a file decides the split of one.
    """
    if len({line.pool for line in report.arms}) > 1:
        raise invalid("decide", "decides the split of one pool; name it with --pool")
    others = [line for line in report.arms if line.looks]
    better = [line.arm for line in others if line.verdict == "stop: better"]
    if len(better) == 1 and all(line.verdict.startswith("stop") for line in others):
        return "" if any(_fails(line) for line in others if line.arm == better[0]) else better[0]
    return report.control if others and all(line.verdict == "stop: worse" for line in others) else ""


def arm_table(report: LiveReport) -> Shown:
    """What the arms are, and what the stop rule says of them."""
    columns = ("pool", "arm", "units", "requests", f"{NAMES[report.rule.metric]}, at any time", "stop rule")
    return Shown(columns, tuple(_arm(line) for line in report.arms), "")


def _arm(line: LiveLine) -> Row:
    counts = (number_cell(count, "{:d}") for count in (line.units, line.requests))
    verdict = line.verdict.rpartition(" ")[2]
    style = verdict if verdict in ("worse", "better") else ""
    cells = (Cell(line.pool), Cell(line.arm), *counts, interval_cell(line.interval, sign=True))
    return Row((*cells, Cell(line.verdict, None, style)), not line.looks)


def figure_table(report: LiveReport) -> Shown:
    """Each figure of each arm."""
    columns = ("pool", "arm", "figure", "mean", "difference", "p", "tells apart")
    rows = [
        Row(
            (
                Cell(line.pool),
                Cell(line.arm),
                Cell(NAMES[metric]),
                interval_cell(line.means.get(metric)),
                interval_cell(line.differences.get(metric), sign=True),
                number_cell(line.p.get(metric), "{:.3g}"),
                number_cell(line.apart.get(metric), "{:.3g}"),
            ),
            not line.looks,
        )
        for line in report.arms
        for metric in METRICS
        if metric != "score" or report.scores
    ]
    return Shown(columns, tuple(rows), "")


def shadow_table(report: LiveReport) -> Shown:
    """Each figure of each shadow, less that of its requests."""
    columns = ("pool", "shadow policy", "pairs", "same text", "figure", "difference", "p", "tells apart")
    rows = [
        Row(
            (
                Cell(line.pool),
                Cell(line.policy),
                number_cell(line.pairs, "{:d}"),
                interval_cell(line.same_text),
                Cell(NAMES[metric]),
                interval_cell(difference, sign=True),
                number_cell(line.p[metric], "{:.3g}"),
                number_cell(line.apart.get(metric), "{:.3g}"),
            ),
            base=False,
        )
        for line in report.shadows
        for metric, difference in line.differences.items()
    ]
    return Shown(columns, tuple(rows), "")


def method(report: LiveReport) -> str:
    """How the figures were made, for people."""
    rule = report.rule
    figures = (
        "Differences have 95% intervals (BCa bootstrap over what the split keeps together, of shadows over requests;"
        " Newcombe of what was answered or not); p is of a permutation test, of shadows a paired one, adjusted for all"
        " comparisons of a pool or a shadow (Holm). Costs are relative to the large model alone."
    )
    if not report.arms:
        return figures
    return (
        f"{figures} Differences of arms are from {report.control}. The stop rule follows {NAMES[rule.metric]}, where no"
        f" value counts as more than {rule.most:g}, by confidence sequences that hold at any time: it says stop where a"
        f" difference is beyond {rule.margin:g}. However often it is asked of units that are over, it is wrong about"
        f" any arm of a split with a chance of at most {rule.alpha:.0%}."
    )


def to_markdown(report: LiveReport) -> str:
    """The page as text."""
    lines = [f"# {report.title}", "", method(report), ""]
    lines += [f"- {line}" for line in (*report.ends, *report.scores, *report.power)]
    if report.arms:
        lines += ["", "## Arms", "", *table_lines(arm_table(report)), "", "## Figures", ""]
        lines += table_lines(figure_table(report))
    if report.shadows:
        lines += ["", "## Shadows", "", *table_lines(shadow_table(report))]
    return "\n".join([*lines, ""])


def to_html(report: LiveReport) -> str:
    """The report as one HTML file that needs nothing else: no network, no other file."""
    return filled(
        "live.html.j2",
        report=report,
        method=method(report),
        arms=arm_table(report),
        figures=figure_table(report),
        shadows=shadow_table(report),
        charts=list(_charts(report)),
    )


def _charts(report: LiveReport) -> Iterator[tuple[str, str]]:
    """What the stop rule knew of each arm as units came, and the margin that it waits for."""
    axes = Axes(UNITS, f"{NAMES[report.rule.metric]}, arm less control")
    for line in report.arms:
        if not line.looks:
            continue
        marks = [
            Mark(units, value.value, value.low, value.high, f"{units} units: {value}")
            for units, value in ((look.units, look.interval) for look in line.looks)
        ]
        ends = (line.looks[0].units, line.looks[-1].units)
        margins = sorted({report.rule.margin, -report.rule.margin})
        bounds = [Series(f"margin {each:g}", [Mark(end, each) for end in ends], joined=True) for each in margins]
        name = f"{line.pool}, {line.arm}: {line.verdict}"
        yield name, chart(name, axes, [Series(line.arm, marks), *bounds])


def to_json(report: LiveReport) -> str:
    """All figures."""
    return as_json(asdict(report))
