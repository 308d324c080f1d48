"""Effect of other requests on one, in wall time: gaps between tokens, a crowd, a known prefix."""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness import Cell, Goal, Report, Side, command_line, run, shown, take_turns
from benchmarks.peers.checkpoints import random_checkpoint
from decoding.model import StopCondition
from decoding.sequence import Sequence
from engine.model import EngineModel
from experiments.replay import answer
from experiments.stats.intervals import Interval
from pool.local_pool import LocalPool
from turnout.calls import GenerateCall
from turnout.config import parse_config
from turnout.types import SamplingParams

RUNNING = 4
CROWD = 100
PREFIX = 1500
ANSWER = 64
LONG_PROMPT = 4000
MODELS = ("35 M", "220 M")
KV_MEMORY_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Smoothness:
    """Medians over rounds, with the smallest and largest.

    Attributes:
        step_s: gap between two tokens of a request while `RUNNING` requests decode, in seconds.
        largest_gap: largest gap while a long prompt is read, in such steps.
        typical_gap: median gap in that time, in such steps.
        undisturbed_gap: largest gap among as many steps with no prompt: what the machine itself does.
        during_crowd: latency of a tenant's request while another tenant has `CROWD`, over its latency alone.
        known_prefix: time to the first token after a prefix of `PREFIX` tokens that is cached, over the first time.
    """

    step_s: Interval
    largest_gap: Interval
    typical_gap: Interval
    undisturbed_gap: Interval
    during_crowd: Interval
    known_prefix: Interval


async def measure(pool: LocalPool, rounds: int = 5, seed: int = 0) -> Smoothness:
    """Take turns between the three measurements on an idle pool."""
    draw = random.Random(seed)
    model = pool.engines[pool.roles["large"]]
    sides: list[Side[Any]] = [
        Side("gaps", lambda _: gaps_while_reading(model, draw)),
        Side("crowd", lambda _: during_crowd(pool, draw)),
        Side("prefix", lambda _: known_prefix(model, draw)),
    ]
    turns = await take_turns(sides, rounds)
    return Smoothness(
        turns.spread("gaps", lambda gap: gap.step_s),
        turns.spread("gaps", lambda gap: gap.largest / gap.step_s),
        turns.spread("gaps", lambda gap: gap.typical / gap.step_s),
        turns.spread("gaps", lambda gap: gap.undisturbed / gap.step_s),
        turns.spread("crowd"),
        turns.spread("prefix"),
    )


@dataclass(frozen=True, slots=True)
class Gaps:
    """Seconds between tokens of running requests: alone, and while a long prompt was read; see `Smoothness`."""

    step_s: float
    largest: float
    typical: float
    undisturbed: float


def _sequence(model: EngineModel, draw: random.Random, length: int, before: tuple[int, ...] = ()) -> Sequence:
    tokens = [*before, *(draw.randrange(model.vocab_size) for _ in range(length))]
    sampling = SamplingParams(temperature=0.0, max_tokens=model.max_length, ignore_eos=True)
    return Sequence(tokens, sampling, 0)


async def gaps_while_reading(model: EngineModel, draw: random.Random) -> Gaps:
    """Gaps between tokens of running requests before and while a long prompt is read, and after it for as long."""
    running = [_sequence(model, draw, 20) for _ in range(RUNNING)]
    times: list[list[float]] = [[] for _ in running]

    async def run(index: int) -> None:
        while True:
            await model.decode(running[index], StopCondition(max_tokens=1))
            times[index].append(time.perf_counter())

    tasks = [asyncio.create_task(run(index)) for index in range(RUNNING)]
    await _until(lambda: all(len(mine) > 30 for mine in times))
    before = len(times[0])
    room = model.max_length - 2 * before
    prompt = _sequence(model, draw, min(LONG_PROMPT, room))
    await model.extend(prompt)
    during = _gaps(times, before - 1)
    model.release(prompt)
    place = len(times[0])
    end = place + min(len(during) // RUNNING, model.max_length - len(running[0].tokens) - 1)
    await _until(lambda: len(times[0]) >= end)
    alone = _gaps(times, place - 1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for seq in running:
        model.release(seq)
    return Gaps(statistics.median(alone), max(during), statistics.median(during), max(alone))


def _gaps(times: list[list[float]], start: int) -> list[float]:
    return [after - now for mine in times for now, after in pairwise(mine[start:])]


async def during_crowd(pool: LocalPool, draw: random.Random) -> float:
    """Latency of one tenant's request while another has a crowd of them, over its latency alone."""
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)

    def call(tenant: str) -> GenerateCall:
        prompt = tuple(draw.randrange(pool.vocab_size) for _ in range(40))
        return GenerateCall("smoothness", pool.name, sampling, prompt, method="plain", tenant=tenant)

    mine = call("quiet")
    alone = await _seconds(answer(pool, mine))
    crowd = [asyncio.create_task(answer(pool, call("crowd"))) for _ in range(CROWD)]
    model = pool.engines[pool.roles["large"]]
    await _until(lambda: any(seq.generated for seq in model.batcher.tables))
    # Another tenant of the same kind, so that nothing of the first answer is cached for it.
    during = await _seconds(answer(pool, replace(mine, tenant=f"quiet-{draw.random()}")))
    for task in crowd:
        task.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)
    return during / alone


async def known_prefix(model: EngineModel, draw: random.Random) -> float:
    """Time to the first token of a prompt whose first tokens are cached, over that of the first such prompt."""
    first = _sequence(model, draw, PREFIX + 20)
    second = _sequence(model, draw, 20, before=tuple(first.tokens[:PREFIX]))
    seconds = []
    for seq in (first, second):
        seconds.append(await _seconds(model.decode(seq, StopCondition(max_tokens=1))))
        model.release(seq)
    return seconds[1] / seconds[0]


async def _seconds(work: Awaitable[object]) -> float:
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


async def _until(condition: Callable[[], bool]) -> None:
    """Let the engine run until something is so."""
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.001)


@dataclass(frozen=True, slots=True)
class Felt:
    """One figure of each model, with what it should be at most, and the factor that it is shown with."""

    name: str
    goal: Goal | None
    figures: dict[str, Interval]
    scale: float = 1.0


def rows(results: dict[str, Smoothness]) -> list[Felt]:
    """Every figure, model by model."""

    def felt(name: str, figure: str, most: float | None = None, scale: float = 1.0) -> Felt:
        goal = None if most is None else Goal(most, at_most=True)
        return Felt(name, goal, {model: getattr(smooth, figure) for model, smooth in results.items()}, scale)

    return [
        felt(f"gap between tokens, {RUNNING} requests running, ms", "step_s", scale=1e3),
        felt(f"largest gap while a prompt of {LONG_PROMPT} tokens is read, in such gaps", "largest_gap", 2.5),
        felt("typical gap in that time", "typical_gap"),
        felt("largest gap in as many steps without the prompt", "undisturbed_gap"),
        felt(f"a tenant's latency with {CROWD} requests of another, over that alone", "during_crowd", 2),
        felt(f"first token after {PREFIX} cached tokens, over the first time", "known_prefix", 0.15),
    ]


def page(results: dict[str, Smoothness], rounds: int) -> Report:
    """The results, a column for each model."""
    report = Report(
        "What a request feels of others",
        f"`python -m benchmarks.latency_jitter`; random Llamas in bfloat16,"
        f" median of {rounds} rounds [smallest, largest].",
    )

    def of(model: str) -> Callable[[Felt], str]:
        return lambda row: shown(row.figures[model], 3, row.scale)

    columns: dict[str, Callable[[Felt], Cell]] = {
        "": lambda row: row.name,
        "at most": lambda row: f"{row.goal.value:g}" if row.goal else None,
        **{model: of(model) for model in results},
    }
    report.table("figures", rows(results), columns)
    return report


async def measure_all(options: argparse.Namespace) -> Report:
    """Every model, one after the other."""
    results = {}
    with tempfile.TemporaryDirectory(prefix="turnout-smooth-") as folder:
        for name in MODELS:
            results[name] = await _measure_checkpoint(random_checkpoint(name, Path(folder)), options.rounds)
    return page(results, options.rounds)


async def _measure_checkpoint(folder: Path, rounds: int) -> Smoothness:
    config = parse_config(
        {
            "models": {"large": {"path": str(folder), "dtype": "bfloat16", "kv_memory_bytes": KV_MEMORY_BYTES}},
            "pools": {"smooth": {"small": "large", "large": "large"}},
        }
    )
    pool = LocalPool.load("smooth", config)
    try:
        return await measure(pool, rounds)
    finally:
        await pool.close()


if __name__ == "__main__":
    run(command_line(__doc__, Path("docs/results/smoothness.md"), rounds=7), measure_all)
