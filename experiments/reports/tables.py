"""The report's further tables: what ways of answering took of the machine, and what tuning is worth."""

from __future__ import annotations

import math

from experiments.reports.data import Report
from experiments.reports.efficiency import Efficiency
from experiments.reports.rows import Cell, Row, Shown, number_cell, without_repeats
from experiments.reports.tuning import TunedLine

TAKEN = (
    "way", "dataset", "pool", "load", "memory (AMU)", "peak memory", "arithmetic (PCU)", "cores", "latency (AL)",
    "tokens/s (IT)", "power (AEC)", "size and quality (MCR)", "s an answer", "price of 1000", "J an answer",
    "idealised s", "idealised price of 1000", "idealised J",
)  # fmt: skip
TAKEN_ONCE = ("pool", "load", *TAKEN[4:])
TUNED = (
    "settings of", "dataset", "pool", "load", "how many", "fixed", "score", "tuned", "score of it", "gap", "held out",
    "spread",
)  # fmt: skip


def taken(report: Report) -> Shown:
    """What each way of answering took."""
    made = [Row(tuple(_taken(line)), line.label == report.baseline) for line in report.efficiency]
    return without_repeats(TAKEN, made, TAKEN_ONCE)


def _taken(line: Efficiency) -> list[Cell]:
    peak = None if line.memory_peak_bytes is None else line.memory_peak_bytes / 2**20
    return [
        Cell(line.label),
        Cell(line.dataset),
        Cell(line.pool),
        Cell(line.load),
        number_cell(line.amu, "{:.2%}"),
        number_cell(peak, "{:.0f} MiB"),
        number_cell(line.pcu, "{:.2%}"),
        number_cell(line.cores, "{:.2f}"),
        number_cell(line.al_s, "{:.3f} s"),
        number_cell(line.tokens_per_s, "{:.1f}"),
        number_cell(line.aec_w, "{:.1f} W"),
        number_cell(line.mcr, "{:.3f}"),
        number_cell(line.seconds, "{:.4f}"),
        number_cell(line.price, "{:.4g}"),
        number_cell(line.joules, "{:.4g}"),
        number_cell(line.idealised_s, "{:.4f}"),
        number_cell(line.idealised_price, "{:.4g}"),
        number_cell(line.idealised_joules, "{:.4g}"),
    ]


def tuned(report: Report) -> Shown:
    """What choosing a setting for each dataset is worth."""
    made = [Row(tuple(_tuned(line)), base=False) for line in report.tuned]
    return without_repeats(TUNED, made, ("pool", "load"))


def _tuned(line: TunedLine) -> list[Cell]:
    return [
        Cell(line.family),
        Cell(line.dataset),
        Cell(line.pool),
        Cell(line.load),
        Cell(str(line.settings), float(line.settings)),
        Cell(line.fixed[0]),
        number_cell(line.fixed[1], "{:.3f}"),
        Cell(line.best[0]),
        number_cell(line.best[1], "{:.3f}"),
        number_cell(line.gap, "{:.3f}"),
        _known(line.held_out, "{:.3f}"),
        _known(line.spread, "{:.1%}"),
    ]


def _known(value: float, form: str) -> Cell:
    """A number, which may be none."""
    return number_cell(None if math.isnan(value) else value, form)
