"""The report as one HTML file that needs nothing else: no network, no other file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2

from experiments.reports.data import WEAK, Line, Report
from experiments.reports.rows import shown
from experiments.reports.svg import Axes, Mark, Series, chart
from experiments.reports.tables import taken, tuned
from experiments.reports.text import TUNED, took_words

ASSETS = Path(__file__).parent / "assets"
SOURCE_COLOURS = 4
FEWEST = 5  # answers of about one length whose speed is drawn
OTHERS = "others (point at them)"


def filled(template: str, **values: Any) -> str:
    """A page that carries its style and its script.

    Args:
        template: file name of one that extends `page.html.j2`.
        values: what it shows.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template(template).render(
        css=(ASSETS / "report.css").read_text(encoding="utf-8"),
        js=(ASSETS / "report.js").read_text(encoding="utf-8"),
        **values,
    )


def to_html(report: Report) -> str:
    """The page."""
    return filled(
        "report.html.j2",
        report=report,
        table=shown(report),
        compared=sum(line.p is not None for line in report.lines),
        pareto=list(_pareto(report)),
        curves=report.curves,
        acceptance=list(_acceptance(report)),
        speeds=list(_speeds(report)),
        taken=taken(report),
        tuned=tuned(report),
        words={"took": took_words(report), "tuned": TUNED},
        load_charts=list(_loads(report)),
        sources=_sources(report),
    )


def _groups(lines: list[Line]) -> Iterator[tuple[str, list[Line]]]:
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(f"{line.dataset}, {line.pool}, {line.load}", []).append(line)
    yield from found.items()


def _pareto(report: Report) -> Iterator[tuple[str, str]]:
    """Quality over cost, the front joined: ways that no other one beats in both. Those behind it are grey."""
    axes = Axes("cost on the paper meter, large model alone = 1", "quality")
    for name, lines in _groups(report.lines):
        marks = {
            line.label: Mark(line.relative, line.quality.value, line.quality.low, line.quality.high,
                             f"{line.label}: cost {line.relative:.3f}, quality {line.quality}")
            for line in lines
        }  # fmt: skip
        found = front(list(marks.values()))
        named = [label for label, mark in marks.items() if mark in found or label in (report.baseline, WEAK)]
        series = [Series(label, [marks[label]]) for label in named]
        others = Series(OTHERS, [mark for label, mark in marks.items() if label not in named], quiet=True)
        svg = chart(f"quality over cost: {name}", axes, [others, *series, Series("front", found, joined=True)])
        if svg:
            yield name, svg


def front(marks: list[Mark]) -> list[Mark]:
    """Those with no other that is better and not dearer, by cost."""
    found: list[Mark] = []
    for mark in sorted(marks, key=lambda mark: (mark.x, -mark.y)):
        if not found or mark.y > found[-1].y:
            found.append(mark)
    return found


def _acceptance(report: Report) -> Iterator[tuple[str, str]]:
    axes = Axes("position in the draft", "share accepted of those drafted")
    for name, lines in _groups(report.lines):
        series = [
            Series(line.label, [Mark(depth, share) for depth, share in enumerate(line.acceptance, 1)], joined=True)
            for line in lines
            if line.acceptance
        ]
        svg = chart(f"acceptance by position: {name}", axes, series)
        if svg:
            yield name, svg


def _speeds(report: Report) -> Iterator[tuple[str, str]]:
    """Speed over the baseline's by the length of the answers, where lengths differ at all."""
    axes = Axes("tokens of the answer", f"tokens a second, {report.baseline} = 1")
    for name, lines in _groups(report.lines):
        marks = {
            line.label: [
                Mark(each.tokens, each.relative)
                for each in line.speed
                if each.relative is not None and each.answers >= FEWEST
            ]
            for line in lines
            if line.label != report.baseline
        }
        series = [Series(label, each, joined=True) for label, each in marks.items() if len(each) > 1]
        svg = chart(f"speed by length: {name}", axes, series)
        if svg:
            yield name, svg


def _loads(report: Report) -> Iterator[tuple[str, str]]:
    """Latencies and goodput over the offered rate."""
    for name, unit, percent in (
        ("ttft_s", "time to first token, p99, s", 99),
        ("end_to_end_s", "whole answer, p50, s", 50),
    ):
        yield from _load_chart(report, name, Axes("offered, requests/s", unit, logarithmic=True), percent)
    yield from _load_chart(report, "goodput", Axes("offered, requests/s", "goodput, answers/s"), None)


def _load_chart(report: Report, name: str, axes: Axes, percent: int | None) -> Iterator[tuple[str, str]]:
    series: dict[str, list[Mark]] = {}
    for each in report.loads:
        value = each[name] if percent is None else {int(k): v for k, v in each[name].items()}.get(percent)
        if value is not None:
            series.setdefault(f"{each['label']}, {each['dataset']}", []).append(Mark(each["offered"], value))
    lines = [Series(label, sorted(marks, key=lambda m: m.x), joined=True) for label, marks in series.items()]
    svg = chart(axes.y, axes, lines)
    if svg:
        yield axes.y, svg


def _sources(report: Report) -> dict[str, str]:
    """A colour for each model that wrote something."""
    names = sorted({piece[0] for each in report.answers for way in each["ways"] for piece in way["pieces"]})
    return {name: f"s{number % SOURCE_COLOURS}" for number, name in enumerate(names)}
