"""Entropy Adaptive Decoding on answers of some hundred tokens (paper #2): worksheets, and a pair that was taught them.

The shipped pair's answers have 40 to 70 tokens, in which stays of ten leave the published rule two or three choices.
`make train-worksheets` continues that pair on worksheets; here it answers held-out ones with the published rule
(window 5, minimum stay 10, effect next) and with the default's gate, each next to random switching with the same start,
share and run length. Judged by the part of a sheet's results that is right.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.bench_ead import page, swept
from benchmarks.harness import Report, command_line, run
from benchmarks.switching_arms import SETTINGS, sheets
from experiments.machine import describe
from turnout.config import ModelConfig, PoolConfig, TurnoutConfig

RESULT = Path("docs/results/worksheets.md")
PAIR = Path(".runs/worksheets")  # where `make train-worksheets` writes
COMPARED = ("paper", "each")


def config_of(pair: Path) -> TurnoutConfig:
    """A pool of the models in a folder's `small` and `large`.

    Raises:
        SystemExit: they are not there.
    """
    if missing := [role for role in ("small", "large") if not (pair / role / "config.json").is_file()]:
        raise SystemExit(f"{pair} has no {' and no '.join(missing)}: make train-worksheets writes them (an hour)")
    models = {role: ModelConfig(path=str(pair / role), kv_memory_bytes=256 << 20) for role in ("small", "large")}
    return TurnoutConfig(models=models, pools={"worksheets": PoolConfig(small="small", large="large")})


async def measure(options: argparse.Namespace) -> Report:
    """Run the settings that were chosen."""
    machine, config = describe(), config_of(options.pair)
    kinds = [sheets(options.problems, options.calibration)]
    tables = await swept(kinds, [SETTINGS[name] for name in options.settings], config)
    title = "Entropy Adaptive Decoding on long answers"
    return page(kinds, tables, machine, title, "make bench-worksheets")


def parser() -> argparse.ArgumentParser:
    """Make the options."""
    made = command_line(__doc__, RESULT, rounds=None, problems=16, calibration=16)
    made.add_argument("--problems", type=int, default=120, help="sheets; absent: 120, 16 with --quick")
    made.add_argument("--calibration", type=int, default=40, help="absent: 40, 16 with --quick")
    made.add_argument("--pair", type=Path, default=PAIR, help=f"folder with small and large; absent: {PAIR}")
    made.add_argument("--settings", nargs="+", choices=sorted(SETTINGS), default=list(COMPARED))
    return made


if __name__ == "__main__":
    run(parser(), measure)
