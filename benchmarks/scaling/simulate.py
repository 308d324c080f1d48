"""Simulates a cluster from one pool to thousands, and writes the page: `make simulate-scaling`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness import note, show
from benchmarks.scaling import costs
from benchmarks.scaling.page import plot, to_markdown
from benchmarks.scaling.sweep import POOLS, SECONDS, check, sweep

RESULTS = Path("docs/results")
QUICK_POOLS, QUICK_SECONDS = (1, 16, 256), 3.0


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--costs", type=Path, default=costs.DEFAULT, help="what `benchmarks.scaling.gather` wrote")
    parser.add_argument("--quick", action="store_true", help="three sizes, printed and not saved")
    parser.add_argument("--out", type=Path, help=f"folder; absent: {RESULTS}, nowhere with --quick")
    chosen = parser.parse_args()
    given = costs.load(chosen.costs)
    sizes, seconds = (QUICK_POOLS, QUICK_SECONDS) if chosen.quick else (POOLS, SECONDS)
    checks = check(given, seconds)
    points = sweep(given, sizes=sizes, seconds=seconds, note=note)
    page = to_markdown(given, checks, points)
    out = chosen.out or (None if chosen.quick else RESULTS)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "simulated.md").write_text(page)
        found = {"checks": [asdict(each) | {"observed": each.observed.model_dump()} for each in checks]}
        found["points"] = [asdict(each) for each in points]
        (out / "simulated.json").write_text(json.dumps(found, indent=1) + "\n")
        plot(points, out / "simulated.png")
    show(page)


if __name__ == "__main__":
    main()
