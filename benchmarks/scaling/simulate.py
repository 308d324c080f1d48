"""Simulates a cluster from one pool to thousands, and writes the page: `make simulate-scaling`."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.harness import Report, command_line, note, run
from benchmarks.scaling import costs
from benchmarks.scaling.page import page
from benchmarks.scaling.sweep import POOLS, SECONDS, check, sweep

QUICK_POOLS, QUICK_SECONDS = (1, 16, 256), 3.0


def measure(options: argparse.Namespace) -> Report:
    """Simulate every size."""
    given = costs.load(options.costs)
    sizes, seconds = (QUICK_POOLS, QUICK_SECONDS) if options.quick else (POOLS, SECONDS)
    return page(given, check(given, seconds), sweep(given, sizes=sizes, seconds=seconds, note=note))


def parser() -> argparse.ArgumentParser:
    """Make the options."""
    made = command_line(__doc__, Path("docs/results/simulated.md"), rounds=None)
    made.add_argument("--costs", type=Path, default=costs.DEFAULT, help="what `benchmarks.scaling.gather` wrote")
    return made


if __name__ == "__main__":
    run(parser(), measure)
