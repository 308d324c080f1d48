"""Several answers, doubts and looking ahead: what they are worth on held-out prompts of the demo pair, and on SmolLM2.

In pieces of at most twenty minutes each on two cores, kept in the page's JSON file: a run measures those that are not
there in its setting, or those that are named, and writes the page from all of them. What is trained for them is kept in
a folder, and used again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.answers import aggregators, look_ahead, real, uncertainty
from benchmarks.harness import Report, command_line, run
from benchmarks.pieces import Pieces, add_options, measure_missing, write_sections

RESULT = Path("docs/results/answers.md")
ARTIFACTS = Path(".runs/answers")
SECTIONS = (aggregators.SECTION, uncertainty.SECTION, look_ahead.SECTION, real.SECTION)


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
        "Several answers, doubts, and looking ahead",
        "`make bench-answers`. Every piece is a run of its own, next to other work on the machine: no times are"
        " given; accuracy, tokens and FLOPs are counted. Sentences that compare are computed from the rows: better and"
        " worse are those whose 95% interval is on one side of 0. The machine is that of the busiest piece.",
        machine=pieces.busiest(),
    )
    write_sections(report, SECTIONS, pieces, failed)
    return report


def parser() -> argparse.ArgumentParser:
    """Make the options."""
    made = command_line(
        __doc__, RESULT, rounds=None, prompts=10, samples=4, training=48, tuning=8, probing=32, looked=5, questions=8
    )
    add_options(made, SECTIONS)
    made.add_argument("--prompts", type=int, default=120, help="of lists, for aggregators and doubts; absent: 120")
    made.add_argument("--samples", type=int, default=16, help="most samples of a prompt; absent: 16")
    made.add_argument("--training", type=int, default=192, help="passages that rankers are trained on; absent: 192")
    made.add_argument("--tuning", type=int, default=32, help="prompts for weights and thresholds; absent: 32")
    made.add_argument("--probing", type=int, default=96, help="prompts that probes are trained on; absent: 96")
    made.add_argument("--looked", type=int, default=48, help="prompts of lists, for looking ahead; absent: 48")
    made.add_argument("--questions", type=int, default=60, help="to the real model; absent: 60")
    made.add_argument("--artifacts", type=Path, default=ARTIFACTS, help=f"what is trained; absent: {ARTIFACTS}")
    return made


if __name__ == "__main__":
    run(parser(), measure)
