"""The report as markdown and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from experiments.reports.data import Report
from experiments.reports.rows import shown

CURVES = "| method | dataset | quality halfway in cost | cost of the baseline's quality | APGR |"
LOADS = "| way | dataset | offered, 1/s | goodput, 1/s | p99 first token, s | errors |"


def to_markdown(report: Report) -> str:
    """The page as text."""
    table = shown(report)
    lines = [
        f"# {report.title}",
        "",
        *(f"Run on: {line}." for line in report.machine),
        f"Differences are from `{report.baseline}` on the same prompts, with 95% intervals (BCa bootstrap; Wilson of"
        " right and wrong); p is of a paired permutation test, adjusted for all comparisons here (Holm). *No worse*: a"
        f" loss of {100 * report.margin:.1f} points or more is excluded. Costs are relative to `{report.baseline}`."
        f" Energy: {report.energy}.",
        "",
        *(f"- {line}" for line in report.power),
        "",
        *([f"Of all: {table.same}.", ""] if table.same else []),
        f"| {' | '.join(table.columns)} |",
        f"| {' | '.join('---' for _ in table.columns)} |",
    ]
    lines += [f"| {' | '.join(cell.text for cell in row.cells)} |" for row in table.rows]
    if report.curves:
        lines += ["", "## Curves", "", CURVES, "| --- | --- | --- | --- | --- |"]
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


def _load_row(each: dict[str, Any]) -> str:
    first = {int(percent): value for percent, value in each["ttft_s"].items()}.get(99)
    shown = "-" if first is None else f"{first:.3f}"
    errors = ", ".join(f"{count} {code}" for code, count in each["errors"].items()) or "none"
    return (
        f"| {each['label']} | {each['dataset']} | {each['offered']:.1f} | {each['goodput']:.1f} | {shown} | {errors} |"
    )


def to_json(report: Report) -> str:
    """All figures; what is not a number is null."""
    return json.dumps(_plain(asdict(report)), indent=1, ensure_ascii=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
