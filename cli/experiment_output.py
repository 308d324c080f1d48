"""How `turnout experiment` shows what it found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from cli.output import print_json, print_table
from cli.output_paths import writing
from turnout.atomic_files import write_whole
from turnout.file_names import one_part

if TYPE_CHECKING:
    from experiments.reports.comparing import Comparison
    from experiments.reports.data import Report
    from experiments.reports.live import LiveReport


def show_report(report: Report, out: Path | None, as_json: bool) -> None:
    """Print a report's table, and write its files where that is asked for."""
    from experiments.reports.rows import COLUMNS, rows
    from experiments.reports.text import to_json

    if out is not None:
        save(report, out)
    if as_json:
        print_json(json.loads(to_json(report)))
        return
    shown = ("way", "dataset", "prompts", "quality", "difference", "p", "verdict", "paper", "time")
    places = [COLUMNS.index(name) for name in shown]
    table = [[row.cells[place].text for place in places] for row in rows(report)]
    print_table([name if place < 2 else f">{name}" for place, name in enumerate(shown)], table)
    for line in report.power:
        typer.echo(line)
    typer.echo(f"run time: {report.run}")
    for name, why in report.missing.items():
        typer.echo(f"not there: {name}: {why}")


def save(report: Report, folder: Path) -> None:
    """Write the page, the text and the figures, named as the experiment, each whole or not at all.

    Raises:
        TurnoutError: INVALID_ARGUMENT: they cannot be written.
    """
    from experiments.reports.html import to_html
    from experiments.reports.text import to_json, to_markdown

    _save(folder, report.title, to_html(report), to_markdown(report), to_json(report))


def _save(folder: Path, name: str, html: str, markdown: str, figures: str) -> None:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for ending, text in (("html", html), ("md", markdown), ("json", figures)):
            write_whole(folder / f"{one_part(name)}.{ending}", text.encode())


def show_comparison(found: Comparison, as_json: bool) -> None:
    """Print what changed, regressions first."""
    if as_json:
        print_json({"regressions": found.regressions, "changes": found.changes, "only_then": found.only_then,
                    "only_now": found.only_now, "lost": found.lost, "power": found.power})  # fmt: skip
        return
    changes = sorted(found.changes, key=lambda change: (not change.worse, not change.better))
    print_table(
        ["way", "figure", ">change", ">p", ">prompts", ""],
        [
            [change.way, change.measure, change.change, f"{change.p:.3g}", change.prompts,
             "WORSE" if change.worse else "better" if change.better else ""]
            for change in changes
        ],
    )  # fmt: skip
    for name, why in found.lost.items():
        typer.echo(f"LOST: {name}: {why}")
    for name in found.only_then:
        typer.echo(f"no longer there: {name}")
    for name in found.only_now:
        typer.echo(f"new: {name}")
    for line in found.power:
        typer.echo(line)
    typer.echo(f"{len(found.regressions)} regressions among {len(found.changes)} figures")


def show_live(report: LiveReport, out: Path | None, as_json: bool) -> None:
    """Print the arms of a split, and shadows with their requests, and write its files if asked to."""
    from experiments.reports.live import to_html, to_json, to_markdown

    if out is not None:
        _save(out, report.title, to_html(report), to_markdown(report), to_json(report))
    if as_json:
        print_json(json.loads(to_json(report)))
        return
    scores = [">score", ">score, difference"] if report.scores else []
    if report.arms:
        print_table(
            ["pool", "arm", ">units", ">requests", ">answered", *scores, ">paper", ">first token", ">p (paper)",
             "stop rule"],
            [
                [line.pool, line.arm, line.units, line.requests, line.means.get("answered", "-"),
                 *(shown.get("score", "-") for shown in (line.means, line.differences)[: len(scores)]),
                 line.means.get("paper", "-"), line.means.get("ttft_s", "-"),
                 f"{line.p['paper']:.3g}" if "paper" in line.p else "-", line.verdict]
                for line in report.arms
            ],
        )  # fmt: skip
    if report.shadows:
        print_table(
            ["pool", "shadow policy", ">pairs", ">same text", *scores[1:], ">paper", ">p"],
            [
                [line.pool, line.policy, line.pairs, line.same_text,
                 *(line.differences.get("score", "-") for _ in scores[1:]), line.differences.get("paper", "-"),
                 f"{line.p['paper']:.3g}" if "paper" in line.p else "-"]
                for line in report.shadows
            ],
        )  # fmt: skip
    for line in (*report.ends, *report.scores, *report.power):
        typer.echo(line)
