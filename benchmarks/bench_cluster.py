"""Cost of models in actors over the same models in one process, and the gain of PEARL where each has a core.

For each pair of models and each distribution of cores both placements are open at once and take turns: round by round
the same requests with the same seeds, colocated and through actors, and each round gives one ratio. Bytes are counted
on the coordinator. Forwards use as many threads as the setting says in both placements.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Goal, Report, Side, Turns, command_line, note, run, shown, take_turns
from benchmarks.peers.checkpoints import random_checkpoint
from benchmarks.peers.workloads import RandomPrompts
from benchmarks.placements.sides import Cores, Placement, Turn, Work, open_actors, open_colocated, pin
from experiments.own_ray import ray_of_its_own
from experiments.pairs import DEMO, REAL, open_pair
from experiments.stats.intervals import Interval, spread
from training.data import arithmetic
from turnout.config import DEMO_METHOD, ModelConfig, PoolConfig, TurnoutConfig

CONCURRENT = 16
TOKENS, PROMPT_TOKENS = 96, 128
OVERHEAD_GOAL, PEARL_GOAL = Goal(0.75), Goal(1.0)
DRAFTED, SWITCHED, PEARL = "speculative", "entropy_adaptive", "pearl"
COLOCATED, ACTORS = "colocated", "actors"
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    DRAFTED: ("speculative", {"drafter": "model_chain", "length": "fixed"}),
    "speculative, rejection": ("speculative", {"length": "fixed", "verifier": "rejection"}),
    SWITCHED: (DEMO_METHOD.name, DEMO_METHOD.params),
    "random_switch": ("random_switch", {"share": 0.5, "mean_run": 6.0, "min_stay": 2}),
    PEARL: ("pearl", {}),
}
PEARL_AT = (1, 4, CONCURRENT)
RANDOM = "random 35 M / 220 M"


@dataclass(frozen=True, slots=True)
class Placed:
    """One method at 16 concurrent requests, in tokens per second, and what it took in actors."""

    pair: str
    cores: str
    method: str
    colocated: Interval
    actors: Interval
    ratio: Interval
    used: tuple[float, ...]
    used_colocated: float
    accepted: float | None
    bytes_there: float
    bytes_back: float
    bytes_between: float

    @property
    def frugality(self) -> float:
        """Tokens per second of CPU time in actors, relative to colocated: says most where other work runs too."""
        return self.actors.value / sum(self.used) / (self.colocated.value / self.used_colocated)


@dataclass(frozen=True, slots=True)
class Overlapped:
    """PEARL and plain speculation, both in actors, in tokens per second."""

    pair: str
    cores: str
    concurrent: int
    speculative: Interval
    pearl: Interval
    ratio: Interval
    accepted: float | None


def settings() -> list[Cores]:
    """How the cores of this machine are given out; the first two are used for every placement in the same way."""
    free = sorted(os.sched_getaffinity(0))
    everything, first, last = frozenset(free), frozenset(free[:1]), frozenset(free[-1:])
    chosen = [Cores("one core for all", first, first, first, 1)]
    if len(free) > 1:
        chosen += [
            Cores("a core for each model", first, first, last, 1),
            Cores("all cores", everything, everything, everything, len(free)),
        ]
    return chosen


def pair_of(name: str, folder: Path) -> tuple[TurnoutConfig, str]:
    """A pair of models, and the name of its pool."""
    if name != RANDOM:
        pair = open_pair(name)
        return pair.config, pair.pool
    paths = {"small": random_checkpoint("35 M", folder), "large": random_checkpoint("220 M", folder)}
    models = {role: ModelConfig(path=str(path), kv_memory_bytes=256 << 20) for role, path in paths.items()}
    return TurnoutConfig(models=models, pools={"pair": PoolConfig(small="small", large="large")}), "pair"


def prompts_of(name: str, count: int) -> list[str | tuple[int, ...]]:
    """As many prompts: arithmetic, or random tokens."""
    if name != RANDOM:
        return [problem.prompt for problem in arithmetic.heldout(3, count)]
    return [tuple(prompt) for prompt in RandomPrompts("cluster").batch(count, PROMPT_TOKENS)]


def _speed(turn: Turn) -> float:
    return turn.speed


async def compare(
    pair: str, cores: Cores, sides: dict[str, Placement], prompts: Sequence[Any], rounds: int, tokens: int
) -> list[Placed]:
    """Every method in both placements, in turn."""
    placed = []
    for label, (method, params) in METHODS.items():
        note(f"{pair}, {cores.name}: {label}")
        work = Work(label, method, params, tuple(prompts), tokens)
        turns = await take_turns([_side(name, side, work) for name, side in sides.items()], rounds)
        placed.append(placed_of(pair, cores.name, label, turns))
    return placed


def _side(name: str, placement: Placement, work: Work) -> Side[Turn]:
    return Side(name, lambda number: placement.turn(work, number))


def placed_of(pair: str, cores: str, label: str, turns: Turns[Turn]) -> Placed:
    """What the turns of one method come to."""
    away = turns.readings[ACTORS]
    written = sum(turn.tokens for turn in away)
    return Placed(
        pair,
        cores,
        label,
        turns.spread(COLOCATED, _speed),
        turns.spread(ACTORS, _speed),
        turns.ratio(ACTORS, COLOCATED, _speed),
        tuple(spread(list(used)).value for used in zip(*(turn.cores for turn in away), strict=True)),
        turns.spread(COLOCATED, lambda turn: turn.cores[0]).value,
        away[0].accepted,
        sum(turn.traffic.there for turn in away) / written,
        sum(turn.traffic.back for turn in away) / written,
        sum(turn.traffic.between for turn in away) / written,
    )


async def overlap(
    pair: str, cores: Cores, side: Placement, prompts: Sequence[Any], rounds: int, tokens: int
) -> list[Overlapped]:
    """PEARL and plain speculation through actors, in turn."""
    found = []
    for concurrent in PEARL_AT:
        note(f"{pair}, {cores.name}: pearl and speculative, {concurrent} at once")
        works = [Work(name, *METHODS[name], tuple(prompts[:concurrent]), tokens) for name in (DRAFTED, PEARL)]
        turns = await take_turns([_side(work.label, side, work) for work in works], rounds)
        speeds = (turns.spread(DRAFTED, _speed), turns.spread(PEARL, _speed), turns.ratio(PEARL, DRAFTED, _speed))
        found.append(Overlapped(pair, cores.name, concurrent, *speeds, turns.readings[PEARL][0].accepted))
    return found


async def measure_pair(
    pair: str, cores: Cores, folder: Path, rounds: int, tokens: int
) -> tuple[list[Placed], list[Overlapped]]:
    """All comparisons of a pair with one distribution of cores."""
    config, name = pair_of(pair, folder)
    prompts = prompts_of(pair, CONCURRENT)
    before = os.sched_getaffinity(0)
    note(f"{pair}, {cores.name}: loading")
    away = open_actors(config, name, cores)
    try:
        here = open_colocated(config, name, cores)
        pin(os.getpid(), cores.coordinator)
        try:
            placed = await compare(pair, cores, {COLOCATED: here, ACTORS: away}, prompts, rounds, tokens)
            apart = not cores.small & cores.large
            return placed, await overlap(pair, cores, away, prompts, rounds, tokens) if apart else []
        finally:
            await here.close()
    finally:
        await away.close()
        pin(os.getpid(), before)
        await asyncio.sleep(0)


def page(rounds: int, tokens: int, placed: list[Placed], overlapped: list[Overlapped]) -> Report:
    """The result page."""
    report = Report(
        "Models in actors and models in one process",
        f"`make bench-cluster`; torch {torch.__version__}; {CONCURRENT} requests at once, {tokens} tokens each,"
        f" sampled; medians of {rounds} alternating rounds [smallest, largest].",
    )
    report.text(
        "Colocated: both models and the methods in one process. Actors: the methods in one process, each model in"
        " another. One core for all: every process on the same core. A core for each model: the large model's actor on"
        " one, the small one's and the methods on the other; colocated on one. All cores: nothing pinned, as many"
        " threads a forward as cores. Ray's own processes run anywhere. The random pair's models do not agree: it shows"
        " what drafts cost, not what they gain. Every round asks the same prompts, with other seeds: they are cached."
        " Work per core: tokens per second of CPU time, in which Ray's threads in these processes are counted."
    )
    report.section("Throughput")
    report.text(f"Goal for {DRAFTED} and {SWITCHED}: {OVERHEAD_GOAL.value} of colocated.")
    throughput = {
        "pair": lambda each: each.pair,
        "cores": lambda each: each.cores,
        "method": lambda each: each.method,
        "colocated, tokens/s": lambda each: shown(each.colocated),
        "actors, tokens/s": lambda each: shown(each.actors),
        "actors / colocated": lambda each: each.ratio,
        "goal met": lambda each: OVERHEAD_GOAL.met(each.ratio) if each.method in (DRAFTED, SWITCHED) else None,
        "cores in use: colocated": lambda each: shown(each.used_colocated, 2),
        "methods, small, large": lambda each: ", ".join(f"{share:.2f}" for share in each.used),
        "work per core, actors / colocated": lambda each: shown(each.frugality, 2),
        "drafts kept": _kept,
    }
    report.table("placements", placed, throughput)
    report.section("PEARL and plain speculation")
    report.text(f"Both through actors, where each model has a core. Goal: {PEARL_GOAL.value:g}.")
    pearl = {
        "pair": lambda each: each.pair,
        "at once": lambda each: each.concurrent,
        "speculative, tokens/s": lambda each: shown(each.speculative),
        "pearl, tokens/s": lambda each: shown(each.pearl),
        "pearl / speculative": lambda each: each.ratio,
        "goal met": lambda each: PEARL_GOAL.met(each.ratio),
        "drafts kept": _kept,
    }
    report.table("pearl", overlapped, pearl)
    report.section("Bytes per token")
    report.text(
        "Between the coordinator and both actors, and tensors from actor to actor. One hop by where its time goes:"
        " `hop.md`."
    )
    moved = {
        "pair": lambda each: each.pair,
        "method": lambda each: each.method,
        "to actors": lambda each: shown(each.bytes_there),
        "from actors": lambda each: shown(each.bytes_back),
        "actor to actor": lambda each: shown(each.bytes_between),
    }
    report.table("bytes", [each for each in placed if each.cores == placed[0].cores], moved)
    return report


def _kept(row: Placed | Overlapped) -> str | None:
    return None if row.accepted is None else f"{row.accepted:.2f}"


async def measure(options: argparse.Namespace) -> Report:
    """Every pair with every distribution of cores."""
    placed: list[Placed] = []
    overlapped: list[Overlapped] = []
    chosen = [each for each in settings() if options.cores in (None, each.name)]
    with ray_of_its_own(), tempfile.TemporaryDirectory(prefix="cluster-") as folder:
        for pair, cores in product(options.pairs, chosen):
            more, overlaps = await measure_pair(pair, cores, Path(folder), options.rounds, options.tokens)
            placed += more
            overlapped += overlaps
    return page(options.rounds, options.tokens, placed, overlapped)


if __name__ == "__main__":
    parser = command_line(__doc__, Path("docs/results/cluster.md"), rounds=7, pairs=[DEMO])
    parser.add_argument("--pairs", nargs="+", choices=(DEMO, REAL, RANDOM), default=[DEMO, RANDOM])
    parser.add_argument("--cores", choices=[each.name for each in settings()], help="absent: all distributions")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each answer")
    run(parser, measure)
