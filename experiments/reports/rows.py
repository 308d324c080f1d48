"""The rows of a report's table, for a page and for text."""

from __future__ import annotations

import math
from dataclasses import dataclass

from experiments.reports.data import METERS, Line, Report
from experiments.statistics import Interval

COLUMNS = (
    "way", "dataset", "pool", "load", "prompts", "quality", "difference", "p", "verdict", "paper", "FLOPs", "time",
    "large tokens", "tokens a round", "first token", "J a token",
)  # fmt: skip
# Columns that are left out where all rows say the same.
ONCE = ("pool", "load", "prompts", "J a token")


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in a place: the text, the number it is sorted by, and how it is marked."""

    text: str
    value: float | None = None
    style: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A way of answering; `base` is the one others are compared with."""

    cells: tuple[Cell, ...]
    base: bool


@dataclass(frozen=True, slots=True)
class Shown:
    """A table without the columns that say the same in every row, which are said once.

    Attributes:
        same: what they say.
    """

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    same: str


def rows(report: Report) -> list[Row]:
    """One for each way of answering each dataset."""
    return [Row(tuple(_cells(line)), line.label == report.baseline) for line in report.lines]


def shown(report: Report) -> Shown:
    """The table that is read: without its columns of one value only."""
    made = rows(report)
    texts = {name: {row.cells[place].text for row in made} for place, name in enumerate(COLUMNS)}
    same = {name: next(iter(texts[name])) for name in ONCE if len(texts[name]) == 1}
    kept = [place for place, name in enumerate(COLUMNS) if name not in same]
    return Shown(
        tuple(COLUMNS[place] for place in kept),
        tuple(Row(tuple(row.cells[place] for place in kept), row.base) for row in made),
        "; ".join(f"{name}: {text}" for name, text in same.items() if text != "-"),
    )


def _cells(line: Line) -> list[Cell]:
    prompts = str(line.prompts)
    if line.unscored:
        prompts += f" ({line.unscored} not scored)"
    if line.errors:
        prompts += f" ({line.errors} refused)"
    if line.stopped:
        prompts += " (stopped early)"
    return [
        Cell(line.label),
        Cell(line.dataset),
        Cell(line.pool),
        Cell(line.load),
        Cell(prompts, float(line.prompts)),
        _interval(line.quality),
        _interval(line.difference, sign=True),
        Cell("-") if line.p is None else Cell(f"{line.p:.3g}", line.p),
        Cell(line.verdict, None, line.verdict if line.verdict in ("worse", "better") else ""),
        *(_interval(line.costs.get(name)) for name in METERS),
        Cell(f"{line.large_share:.0%}", line.large_share),
        _number(line.tokens_per_round, "{:.2f}"),
        Cell(f"{line.ttft_s[0] * 1e3:.0f} / {line.ttft_s[1] * 1e3:.0f} ms", line.ttft_s[0]),
        _number(line.joules_per_token, "{:.3g}"),
    ]


def _interval(value: Interval | None, sign: bool = False) -> Cell:
    if value is None or not math.isfinite(value.value):
        return Cell("-")
    form = "{:+.3f} [{:+.3f}, {:+.3f}]" if sign else "{:.3f} [{:.3f}, {:.3f}]"
    return Cell(form.format(value.value, value.low, value.high), value.value)


def _number(value: float | None, form: str) -> Cell:
    return Cell("-") if value is None else Cell(form.format(value), value)
