"""Machines side by side: ours over each engine, a column for each page of a machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.machine import one_line

STEM = "peers"
CASE = {"subject": "model", "workload": "work", "ours": "ours", "against": "over"}  # of a verdict, and its column


def page_of(folder: Path, instruction_set: str) -> Path:
    """Return the page of machines with an instruction set: its newest run."""
    return folder / f"{STEM}-{instruction_set.replace('-', '').replace(' ', '-').lower()}.md"


def overview(folder: Path) -> str:
    """Put the pages of a folder side by side, as Markdown; empty where there is none."""
    pages = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"{STEM}-*.json"))}
    if not pages:
        return ""
    measured = {stem: _column(values["verdicts"]) for stem, values in pages.items()}
    cases = dict.fromkeys(case for column in measured.values() for case in column)
    heads = [*CASE.values(), *pages]
    cells = [[*case, *(each.get(case, "") for each in measured.values())] for case in cases]
    rows = [heads, ["---"] * len(heads), *cells]
    machines = [
        f"- [{stem}]({stem}.md): {values.get('date', 'before 2026-11-28')}; {one_line(values['machine'])}"
        for stem, values in pages.items()
    ]
    parts = (
        "# Turnout next to other engines, by machine",
        "`make bench` writes a page for the instruction set of its machine, and this one from all of them: ours over"
        " each engine, or a number of ours where no engine is named; medians of the rounds of one run [smallest,"
        " largest]. What a page did not measure is empty. Figures of different columns are of different days.",
        "\n".join(machines),
        "\n".join(f"| {' | '.join(row)} |" for row in rows),
    )
    return "\n\n".join(parts) + "\n"


def _column(verdicts: list[dict[str, Any]]) -> dict[tuple[str, ...], str]:
    """What one page says of each case, and whether its goal is met."""
    found = {}
    for each in verdicts:
        if each["met"] != "not measured":
            goal = f" ({each['goal']}: {each['met']})" if each["goal"] else ""
            found[tuple(each[name] for name in CASE)] = each["measured"] + goal
    return found
