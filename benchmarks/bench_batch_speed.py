"""Speed of a job over that of the engine alone, where nothing is killed: with the demo pair, and a dearer large model.

Both answer the same prompts, equally many at once, and take turns. The job runs on a cluster of two nodes, as in
`benchmarks.batch_chaos`. A job's own work is the same for each line; a large model deepened by layers that write
nothing shows it where a line costs more.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from benchmarks.batch_chaos import BLOCK_ROWS, CONCURRENCY, MAX_TOKENS, chaos, engine_rate
from benchmarks.batch_outcome import LEAST_SHARE
from benchmarks.bench_switching import EXTRA_LAYERS, pair_of
from benchmarks.harness import Goal, Report, Side, command_line, note, run, shown, take_turns
from benchmarks.retention import judged
from experiments.stats.intervals import Interval

DEMO_ONLY = "it compares the demo pair with its deepened large model"


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
        share: the job's over `engine` of its round.
    """

    pair: str
    actors: int
    engine: Interval
    usual: Interval
    job: Interval
    share: Interval


async def compare(case: Case, rounds: int, folder: Path) -> Speed:
    """A case's rounds.

    Args:
        case: what is run.
        rounds: that count; these take minutes, and the engine is new in each: none warms up.
        folder: for the model and its configuration.
    """
    note(f"{case}")
    pair = pair_of(case.extra, folder)
    config = folder / "pair.yaml"
    config.write_text(yaml.safe_dump(pair.config.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")

    def job() -> float:
        with chaos(case.rows, case.actors, concurrency=CONCURRENCY // case.actors, config=config) as made:
            return made.run([]).rate

    def engine(for_throughput: bool) -> float:
        return engine_rate(case.rows, config, for_throughput=for_throughput)

    sides = [
        Side("engine", lambda _: asyncio.to_thread(engine, True)),
        Side("usual", lambda _: asyncio.to_thread(engine, False)),
        Side("job", lambda _: asyncio.to_thread(job)),
    ]
    turns = await take_turns(sides, rounds, warm_up=False)
    engine_alone, usual, mine = (turns.spread(name) for name in turns.readings)
    return Speed(pair.title, case.actors, engine_alone, usual, mine, turns.ratio("job", "engine"))


def page(speeds: list[Speed], rounds: int) -> Report:
    """The page."""
    report = Report(
        "A batch and the engine alone",
        f"`make bench-batch`. Short prompts, whole answers (at most {MAX_TOKENS} tokens), {CONCURRENCY} at once, blocks"
        f" of {BLOCK_ROWS}; the job on a cluster of two nodes of this machine, of which one does the work; medians of"
        f" {rounds} rounds [smallest, largest]. A deepened large model has layers whose output projections are zero:"
        " they are computed, and change no answer. The engine alone is one process, with a job's settings, by which it"
        " is judged, and with its usual ones, which bound the length of a step. Several copies of a job share what it"
        " has at once.",
    )
    columns = {
        "pair": lambda each: each.pair,
        "copies": lambda each: each.actors,
        "engine alone, lines/s": lambda each: shown(each.engine, 1),
        "with its usual settings": lambda each: shown(each.usual, 1),
        "job, lines/s": lambda each: shown(each.job, 1),
        "job over engine": lambda each: shown(each.share, 2),
        "": lambda each: judged(each.share, Goal(LEAST_SHARE), "{:g}"),
    }
    report.table("speeds", speeds, columns)
    return report


async def measure(options: argparse.Namespace) -> Report:
    """Every case, one after the other."""
    with tempfile.TemporaryDirectory(prefix="batch-speed-") as folder:
        cases = [replace(case, rows=case.rows // (5 if options.quick else 1)) for case in CASES]
        return page([await compare(case, options.rounds, Path(folder)) for case in cases], options.rounds)


if __name__ == "__main__":
    run(command_line(__doc__, Path("docs/results/batch-speed.md"), rounds=3, demo_only=DEMO_ONLY), measure)
