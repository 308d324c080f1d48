"""The rows of a report's table, for a page and for text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.reports.data import METERS, Line, Report
from experiments.stats.intervals import Interval

COLUMNS = (
    "way", "dataset", "pool", "load", "prompts", "quality", "difference", "p", "verdict", "paper", "FLOPs", "time",
    "large tokens", "tokens a round", "first token", "J a token",
)  # fmt: skip
# Columns that are left out where all rows say the same.
ONCE = ("pool", "load", "prompts", "J a token")


@dataclass(frozen=True, slots=True)
class Cell:
    """Content of a place: the text, the number it is sorted by, and how it is marked."""

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
    return without_repeats(COLUMNS, rows(report), ONCE)


def without_repeats(columns: Sequence[str], made: Sequence[Row], once: Sequence[str]) -> Shown:
    """A table without columns that say the same in every row.

    Args:
        columns: names.
        made: rows of as many cells.
        once: columns that may be left out.
    """
    texts = {name: {row.cells[place].text for row in made} for place, name in enumerate(columns)}
    same = {name: next(iter(texts[name])) for name in once if len(texts[name]) == 1}
    kept = [place for place, name in enumerate(columns) if name not in same]
    return Shown(
        tuple(columns[place] for place in kept),
        tuple(Row(tuple(row.cells[place] for place in kept), row.base) for row in made),
        "; ".join(f"{name}: {text}" for name, text in same.items() if text != "-"),
    )


def _cells(line: Line) -> list[Cell]:
    prompts = str(line.prompts) if line.seeds == 1 else f"{line.prompts}, {line.seeds} seeds"
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
        interval_cell(line.quality),
        interval_cell(line.difference, sign=True),
        number_cell(line.p, "{:.3g}"),
        Cell(line.verdict, None, line.verdict if line.verdict in ("worse", "better") else ""),
        *(interval_cell(line.costs.get(name)) for name in METERS),
        Cell(f"{line.large_share:.0%}", line.large_share),
        number_cell(line.tokens_per_round, "{:.2f}"),
        Cell(f"{line.ttft_s[0] * 1e3:.0f} / {line.ttft_s[1] * 1e3:.0f} ms", line.ttft_s[0]),
        number_cell(line.joules_per_token, "{:.3g}"),
    ]


def interval_cell(value: Interval | None, sign: bool = False) -> Cell:
    """An estimate with its interval, or by itself where none is known.

    Args:
        value: None, or no number: there is no estimate.
        sign: of differences, which are also written with a plus.
    """
    if value is None or not math.isfinite(value.value):
        return Cell("-")
    form = "{:+.3f}" if sign else "{:.3f}"
    text = form.format(value.value)
    if math.isfinite(value.low) and math.isfinite(value.high):
        text += f" [{form.format(value.low)}, {form.format(value.high)}]"
    return Cell(text, value.value)


def number_cell(value: float | None, form: str) -> Cell:
    """A number in a format of `str.format`, sorted by its value; None: there is none."""
    return Cell("-") if value is None else Cell(form.format(value), value)
