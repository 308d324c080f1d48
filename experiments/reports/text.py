"""The report as markdown and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from experiments.reports.data import Report
from experiments.reports.efficiency import idle_words, reference_words
from experiments.reports.rows import Shown, shown
from experiments.reports.tables import taken, tuned

REACHED = (
    "Where nothing stands, the method's cheapest setting costs more than that, or the two ends are no gap to recover."
)
CURVES = "| method | dataset | quality halfway in cost | cost of the baseline's quality | APGR |"
TOOK = (
    "Memory (AMU) and arithmetic (PCU) are shares of what there is, averaged over time; AL is the mean time of a"
    " request, waiting included; MCR compares sizes of models at work and quality with the baseline's; an idealised"
    " time is that of a request alone, each token charged to the model that wrote it"
)
TUNED = (
    "The fixed setting is the best on the mean over the datasets, the tuned one the best of each, on the prompts it was"
    " chosen on; held out: chosen on one half of the prompts, scored on the other; spread: (best - worst) / best"
)
LOADS = "| way | dataset | offered, 1/s | goodput, 1/s | p99 first token, s | errors |"


def to_markdown(report: Report) -> str:
    """The page as text."""
    table = shown(report)
    lines = [
        f"# {report.title}",
        "",
        *(f"Run on: {line}." for line in report.machine),
        f"Run time: {report.run}.",
        f"Differences are from `{report.baseline}` on the same prompts, with 95% intervals (BCa bootstrap; Wilson of"
        " right and wrong); p is of a paired permutation test, adjusted for all comparisons here (Holm). *No worse*: a"
        f" loss of {100 * report.margin:.1f} points or more is excluded. Costs are relative to `{report.baseline}`."
        f" Energy: {report.energy}.",
        "",
        *(f"- {line}" for line in report.power),
        "",
        *([f"Of all: {table.same}.", ""] if table.same else []),
        *table_lines(table),
    ]
    lines += _section("What it took", taken(report), *took_words(report))
    lines += _section("Fixed and tuned settings", tuned(report), TUNED) if report.tuned else []
    if report.curves:
        lines += ["", "## Curves", "", REACHED, "", CURVES, "| --- | --- | --- | --- | --- |"]
        lines += [
            f"| {c.method} | {c.dataset} | {c.at_half} | {c.for_quality} | {c.recovered or '-'} |"
            for c in report.curves
        ]
    if report.loads:
        lines += ["", "## Under load", "", LOADS, "| --- | --- | --- | --- | --- | --- |"]
        lines += [_load_row(each) for each in report.loads]
    if report.missing:
        lines += ["", "## Not there", "", *(f"- {name}: {why}" for name, why in report.missing.items())]
    return "\n".join([*lines, ""])


def _section(name: str, table: Shown, *said: str) -> list[str]:
    words = [*said, *([f"Of all: {table.same}"] if table.same else [])]
    return ["", f"## {name}", "", " ".join(f"{line}." for line in words), "", *table_lines(table)]


def took_words(report: Report) -> list[str]:
    """Sentences about the table of what ways took."""
    known = (idle_words(report.efficiency), reference_words(report.references))
    return [TOOK, *(line for line in known if line)]


def table_lines(table: Shown) -> list[str]:
    """A table as text."""
    return [
        f"| {' | '.join(table.columns)} |",
        f"| {' | '.join('---' for _ in table.columns)} |",
        *(f"| {' | '.join(cell.text for cell in row.cells)} |" for row in table.rows),
    ]


def _load_row(each: dict[str, Any]) -> str:
    first = {int(percent): value for percent, value in each["ttft_s"].items()}.get(99)
    shown = "-" if first is None else f"{first:.3f}"
    errors = ", ".join(f"{count} {code}" for code, count in each["errors"].items()) or "none"
    return (
        f"| {each['label']} | {each['dataset']} | {each['offered']:.1f} | {each['goodput']:.1f} | {shown} | {errors} |"
    )


def to_json(report: Report) -> str:
    """All figures."""
    return as_json(asdict(report))


def as_json(values: dict[str, Any]) -> str:
    """Plain values as the text of a file; what is not a number is null."""
    return json.dumps(_plain(values), indent=1, ensure_ascii=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
