"""The real model: equal to Hugging Face, speed next to peers, speculation by kind of text, entropy switching.

In pieces of at most half an hour each, kept in the page's JSON file: a run measures those that are not there in its
setting, or those that are named, and writes the page from all of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.bench_peers import PEERS_PYTHON, VLLM_PYTHON
from benchmarks.harness import Report, command_line, run
from benchmarks.pieces import Pieces, add_options, measure_missing, write_sections
from benchmarks.real import equality, speculation, speed, switching
from experiments import real_model

RESULT = Path("docs/results/real.md")
SECTIONS = (equality.SECTION, speed.SECTION, speculation.SECTION, switching.SECTION)


async def measure(options: argparse.Namespace) -> Report:
    """Measure what is asked for or not there, each piece kept at once; then write the page from all that is there.

    Raises:
        TurnoutError: a piece that was named cannot be measured here.
    """
    pieces, failed = await measure_missing(SECTIONS, options)
    return page(pieces, failed)


def page(pieces: Pieces, failed: dict[str, str]) -> Report:
    """The report of all pieces that are there.

    Args:
        pieces: what was measured.
        failed: by piece, why it could not be.
    """
    report = Report(
        f"A real model: {real_model.TITLE}",
        "`make bench-real`, with the model of `make real`: 135 M parameters, converted from a GGUF file of 4-bit"
        " weights (Q4_1), which llama.cpp runs as shipped too. Every piece is a run of its own; where pieces differ in"
        " machine or date, the last table says so; here stands that of the busiest.",
        machine=pieces.busiest(),
    )
    write_sections(report, SECTIONS, pieces, failed)
    return report


def parser() -> argparse.ArgumentParser:
    """Make the options."""
    made = command_line(__doc__, RESULT, rounds=3, tokens=16, each=2)
    add_options(made, SECTIONS)
    made.add_argument("--tokens", type=int, default=96, help="of an answer")
    made.add_argument("--each", type=int, default=12, help="prompts of each kind of text")
    made.add_argument("--peers-python", type=Path, default=PEERS_PYTHON)
    made.add_argument("--vllm-python", type=Path, default=VLLM_PYTHON)
    return made


if __name__ == "__main__":
    run(parser(), measure)
