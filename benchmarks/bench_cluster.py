"""What models in actors cost beside the same models in one process, and what PEARL gains where each has a core.

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import uvloop

from benchmarks.bench_hop import busy_note
from benchmarks.harness import note, publish
from benchmarks.peers.checkpoints import random_checkpoint
from benchmarks.peers.workloads import RandomPrompts
from benchmarks.placements.sides import Cores, Side, Turn, Work, open_actors, open_colocated, pin
from experiments.machine import describe, one_line
from experiments.own_ray import ray_of_its_own
from experiments.statistics import Interval, spread
from training.data import arithmetic
from turnout.config import DEMO_METHOD, ModelConfig, PoolConfig, TurnoutConfig

RESULT = Path("docs/results/cluster.md")
CONCURRENT = 16
TOKENS, PROMPT_TOKENS = 96, 128
ROUNDS = 7
OVERHEAD_GOAL, PEARL_GOAL = 0.75, 1.0
DRAFTED, SWITCHED = "speculative", "entropy_adaptive"
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    DRAFTED: ("speculative", {}),
    "speculative, rejection": ("speculative", {"verifier": "rejection"}),
    SWITCHED: (DEMO_METHOD.name, DEMO_METHOD.params),
    "random_switch": ("random_switch", {"share": 0.5, "mean_run": 6.0, "min_stay": 2}),
    "pearl": ("pearl", {}),
}
PEARL_AT = (1, 4, CONCURRENT)
DEMO, RANDOM = "demo", "random 35 M / 220 M"


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
        """Tokens per second of CPU time in actors, relative to colocated: says most where other work runs beside."""
        return self.actors.value / sum(self.used) / (self.colocated.value / self.used_colocated)


@dataclass(frozen=True, slots=True)
class Overlapped:
    """PEARL beside plain speculation, both in actors, in tokens per second."""

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
    if name == DEMO:
        return TurnoutConfig.demo(), "demo"
    paths = {"small": random_checkpoint("35 M", folder), "large": random_checkpoint("220 M", folder)}
    models = {role: ModelConfig(path=str(path), kv_memory_bytes=256 << 20) for role, path in paths.items()}
    return TurnoutConfig(models=models, pools={"pair": PoolConfig(small="small", large="large")}), "pair"


def prompts_of(name: str, count: int) -> list[str | tuple[int, ...]]:
    """As many prompts: arithmetic, or random tokens."""
    if name == DEMO:
        return [problem.prompt for problem in arithmetic.heldout(3, count)]
    return [tuple(prompt) for prompt in RandomPrompts("cluster").batch(count, PROMPT_TOKENS)]


async def compare(
    pair: str, cores: Cores, sides: tuple[Side, Side], prompts: Sequence[Any], rounds: int, tokens: int
) -> list[Placed]:
    """Every method in both placements, taking turns; one round is thrown away."""
    placed = []
    for label, (method, params) in METHODS.items():
        note(f"{pair}, {cores.name}: {label}")
        work = Work(label, method, params, tuple(prompts), tokens)
        pairs: list[tuple[Turn, Turn]] = []
        for number in range(rounds + 1):
            order = (0, 1) if number % 2 else (1, 0)
            turns = {which: await sides[which].turn(work, number) for which in order}
            pairs.append((turns[0], turns[1]))
        placed.append(_placed(pair, cores.name, label, pairs[1:]))
    return placed


def _placed(pair: str, cores: str, label: str, pairs: list[tuple[Turn, Turn]]) -> Placed:
    away = [turn for _, turn in pairs]
    written = sum(turn.tokens for turn in away)
    return Placed(
        pair,
        cores,
        label,
        spread([turn.speed for turn, _ in pairs]),
        spread([turn.speed for turn in away]),
        spread([theirs.speed / mine.speed for mine, theirs in pairs]),
        tuple(spread(list(used)).value for used in zip(*(turn.cores for turn in away), strict=True)),
        spread([turn.cores[0] for turn, _ in pairs]).value,
        away[0].accepted,
        sum(turn.traffic.there for turn in away) / written,
        sum(turn.traffic.back for turn in away) / written,
        sum(turn.traffic.between for turn in away) / written,
    )


async def overlap(
    pair: str, cores: Cores, side: Side, prompts: Sequence[Any], rounds: int, tokens: int
) -> list[Overlapped]:
    """PEARL and plain speculation through actors, taking turns; one round is thrown away."""
    found = []
    for concurrent in PEARL_AT:
        note(f"{pair}, {cores.name}: pearl beside speculative, {concurrent} at once")
        works = [Work(name, *METHODS[name], tuple(prompts[:concurrent]), tokens) for name in (DRAFTED, "pearl")]
        pairs: list[tuple[Turn, Turn]] = []
        for number in range(rounds + 1):
            order = (0, 1) if number % 2 else (1, 0)
            turns = {which: await side.turn(works[which], number) for which in order}
            pairs.append((turns[0], turns[1]))
        pairs = pairs[1:]
        found.append(
            Overlapped(
                pair,
                cores.name,
                concurrent,
                spread([plain.speed for plain, _ in pairs]),
                spread([pearl.speed for _, pearl in pairs]),
                spread([pearl.speed / plain.speed for plain, pearl in pairs]),
                pairs[0][1].accepted,
            )
        )
    return found


async def measure(
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
            placed = await compare(pair, cores, (here, away), prompts, rounds, tokens)
            apart = not cores.small & cores.large
            return placed, await overlap(pair, cores, away, prompts, rounds, tokens) if apart else []
        finally:
            await here.close()
    finally:
        await away.close()
        pin(os.getpid(), before)
        await asyncio.sleep(0)


def to_markdown(
    machine: dict[str, str], rounds: int, tokens: int, placed: list[Placed], overlapped: list[Overlapped]
) -> str:
    """The result page."""
    lines = [
        "# Models in actors beside models in one process",
        "",
        f"`make bench-cluster`; {one_line(machine)}; torch {torch.__version__}; {CONCURRENT} requests at once,"
        f" {tokens} tokens each, sampled; medians of {rounds} alternating rounds [smallest, largest].",
        "",
        "Colocated: both models and the methods in one process. Actors: the methods in one process, each model in"
        " another. One core for all: every process on the same core. A core for each model: the large model's actor on"
        " one, the small one's and the methods on the other; colocated on one. All cores: nothing pinned, as many"
        " threads a forward as cores. Ray's own processes run anywhere. The random pair's models do not agree: it shows"
        " what drafts cost, not what they gain. Every round asks the same prompts, with other seeds: they are cached."
        " Work per core: tokens per second of CPU time, in which Ray's threads in these processes are counted.",
        "",
        *busy_note(machine),
        "## Throughput",
        "",
        f"Goal for {DRAFTED} and {SWITCHED}: {OVERHEAD_GOAL} of colocated.",
        "",
        "| pair | cores | method | colocated, tokens/s | actors, tokens/s | actors / colocated | goal |"
        " cores in use: colocated | methods, small, large | work per core, actors / colocated | drafts kept |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in placed:
        used = ", ".join(f"{share:.2f}" for share in each.used)
        row = (each.pair, each.cores, each.method, _speed(each.colocated), _speed(each.actors), str(each.ratio))
        lines.append(
            f"| {' | '.join(row)} | {_verdict(each)} | {each.used_colocated:.2f} | {used} |"
            f" {each.frugality:.2f} | {_share(each.accepted)} |"
        )
    lines += [
        "",
        "## PEARL beside plain speculation",
        "",
        f"Both through actors, where each model has a core. Goal: {PEARL_GOAL:g}.",
        "",
        "| pair | at once | speculative, tokens/s | pearl, tokens/s | pearl / speculative | goal | drafts kept |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in overlapped:
        shown = (one.pair, str(one.concurrent), _speed(one.speculative), _speed(one.pearl), str(one.ratio))
        met = "met" if one.ratio.value >= PEARL_GOAL else "missed"
        lines.append(f"| {' | '.join(shown)} | {met} | {_share(one.accepted)} |")
    return "\n".join([*lines, *_bytes_table(placed), ""])


def _bytes_table(placed: list[Placed]) -> list[str]:
    lines = [
        "",
        "## Bytes per token",
        "",
        "Between the coordinator and both actors, and tensors from actor to actor. One hop by where its time goes:"
        " `hop.md`.",
        "",
        "| pair | method | to actors | from actors | actor to actor |",
        "| --- | --- | --- | --- | --- |",
    ]
    first = placed[0].cores if placed else ""
    lines += [
        f"| {each.pair} | {each.method} | {each.bytes_there:.0f} | {each.bytes_back:.0f} | {each.bytes_between:.0f} |"
        for each in placed
        if each.cores == first
    ]
    return lines


def _verdict(placed: Placed) -> str:
    if placed.method not in (DRAFTED, SWITCHED):
        return ""
    return "met" if placed.ratio.value >= OVERHEAD_GOAL else "missed"


def _speed(interval: Interval) -> str:
    return f"{interval.value:.0f} [{interval.low:.0f}, {interval.high:.0f}]"


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.2f}"


async def measure_all(
    pairs: list[str], chosen: list[Cores], rounds: int, tokens: int
) -> tuple[list[Placed], list[Overlapped]]:
    """Every pair with every distribution of cores."""
    placed: list[Placed] = []
    overlapped: list[Overlapped] = []
    with tempfile.TemporaryDirectory(prefix="cluster-") as folder:
        for pair in pairs:
            for cores in chosen:
                more, overlaps = await measure(pair, cores, Path(folder), rounds, tokens)
                placed += more
                overlapped += overlaps
    return placed, overlapped


def main(pairs: list[str], only: str | None, rounds: int, tokens: int, out: Path | None) -> None:
    """Measure, print, and save where there is a place for it."""
    machine = describe()
    chosen = [each for each in settings() if only is None or each.name == only]
    with ray_of_its_own():
        placed, overlapped = uvloop.run(measure_all(pairs, chosen, rounds, tokens))
    text = to_markdown(machine, rounds, tokens, placed, overlapped)
    parts = {
        "machine": machine,
        "rounds": rounds,
        "tokens": tokens,
        "placements": [asdict(each) for each in placed],
        "pearl": [asdict(each) for each in overlapped],
    }
    publish(text, out, parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", nargs="+", choices=(DEMO, RANDOM), default=[DEMO, RANDOM])
    parser.add_argument("--cores", choices=[each.name for each in settings()], help="absent: all distributions")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each answer")
    parser.add_argument("--quick", action="store_true", help="one round of the demo pair; printed and not saved")
    parser.add_argument("--out", type=Path, help=f"absent: {RESULT}, nowhere with --quick")
    asked = parser.parse_args()
    if asked.quick:
        main([DEMO], asked.cores, 1, asked.tokens, asked.out)
    else:
        main(asked.pairs, asked.cores, asked.rounds, asked.tokens, asked.out or RESULT)
