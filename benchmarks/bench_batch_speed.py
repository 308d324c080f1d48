"""How fast a job is beside the engine alone, where nothing is killed: with the demo pair, and a dearer large model.

Both answer the same prompts, so many at once, and take turns. The job runs on a cluster of two nodes, as in
`benchmarks.batch_chaos`. What a job does beside the engine's work is the same for each line; a large model deepened by
layers that write nothing tells what it comes to where a line costs more.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from benchmarks.batch_chaos import BLOCK_ROWS, CONCURRENCY, MAX_TOKENS, chaos, engine_rate
from benchmarks.batch_outcome import LEAST_SHARE
from benchmarks.bench_switching import EXTRA_LAYERS, pair_of
from benchmarks.harness import note, publish
from benchmarks.retention import judged
from experiments.machine import describe, one_line
from experiments.statistics import Interval, spread

RESULT = Path("docs/results/batch-speed.md")
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Case:
    """A job that is measured.

    Attributes:
        extra: layers that are added to the large model.
        rows: lines.
        actors: copies of the pool, which share the requests that are answered at once.
    """

    extra: int
    rows: int
    actors: int = 1


CASES = (Case(0, 4000), Case(0, 4000, actors=2), Case(EXTRA_LAYERS, 1000))


@dataclass(frozen=True, slots=True)
class Speed:
    """One case, lines a second.

    Attributes:
        engine: the engine alone, with the settings of a job.
        usual: with its own, which bound the length of a step.
        share: the job's beside `engine` of its round.
    """

    pair: str
    actors: int
    engine: Interval
    usual: Interval
    job: Interval
    share: Interval


def measure(case: Case, rounds: int, folder: Path) -> Speed:
    """A case's rounds; who goes first changes.

    Args:
        case: what is run.
        rounds: how often.
        folder: for the model and its configuration.
    """
    pair = pair_of(case.extra, folder)
    config = folder / "pair.yaml"
    config.write_text(yaml.safe_dump(pair.config.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")

    def job() -> float:
        with chaos(case.rows, case.actors, concurrency=CONCURRENCY // case.actors, config=config) as made:
            return made.run([]).rate

    sides = (lambda: engine_rate(case.rows, config, unhurried=True), lambda: engine_rate(case.rows, config), job)
    found: list[list[float]] = []
    for number in range(rounds):
        order = [(number + place) % len(sides) for place in range(len(sides))]
        rates = {place: sides[place]() for place in order}
        found.append([rates[place] for place in range(len(sides))])
        engine, usual, mine = found[-1]
        note(f"{case}: engine {engine:.1f}, with its usual settings {usual:.1f}, job {mine:.1f} lines a second")
    engines, usuals, jobs = (spread(list(side)) for side in zip(*found, strict=True))
    shares = spread([mine / engine for engine, _, mine in found])
    return Speed(pair.title, case.actors, engines, usuals, jobs, shares)


def to_markdown(speeds: list[Speed], rounds: int, machine: dict[str, str]) -> str:
    """The page."""
    lines = [
        "# A batch beside the engine alone",
        "",
        f"`make bench-batch`; {one_line(machine)}. Short prompts, whole answers (at most {MAX_TOKENS} tokens),"
        f" {CONCURRENCY} at once, blocks of {BLOCK_ROWS}; the job on a cluster of two nodes of this machine, of which"
        f" one does the work; medians of {rounds} rounds [smallest, largest]. A deepened large model has layers whose"
        " output projections are zero: they are computed, and change no answer. The engine alone is one process, with a"
        " job's settings, by which it is judged, and with its usual ones, which bound the length of a step. Several"
        " copies of a job share what it has at once.",
        "",
        "| pair | copies | engine alone, lines/s | with its usual settings | job, lines/s | job beside engine | |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    lines += [
        f"| {each.pair} | {each.actors} | {_short(each.engine, 1)} | {_short(each.usual, 1)} | {_short(each.job, 1)}"
        f" | {_short(each.share, 2)} | {judged(each.share, LEAST_SHARE, '{:g}')} |"
        for each in speeds
    ]
    return "\n".join([*lines, ""])


def _short(interval: Interval, digits: int) -> str:
    return f"{interval.value:.{digits}f} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"


def main(quick: bool, out: Path | None) -> None:
    """Measure, print, and save where there is a place for it."""
    machine, rounds = describe(), 1 if quick else ROUNDS
    with tempfile.TemporaryDirectory(prefix="batch-speed-") as folder:
        cases = [replace(case, rows=case.rows // (5 if quick else 1)) for case in CASES]
        speeds = [measure(case, rounds, Path(folder)) for case in cases]
    publish(to_markdown(speeds, rounds, machine), out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round, results printed and not saved")
    parser.add_argument("--out", type=Path, help=f"absent: {RESULT}, nowhere with --quick")
    chosen = parser.parse_args()
    main(chosen.quick, chosen.out if chosen.quick else chosen.out or RESULT)
