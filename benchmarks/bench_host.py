"""Host time of a step: what the processor does around forwards that cost nothing.

The layers of a small model with random weights are replaced by ones that return at once, or after a fixed time asleep.
What is left is the host's part of a step: planning it, laying it out, reading rows, handing them out, and what runs
between two steps: methods, texts, streams. Processor time is the whole process's, so that other work on the machine
moves it less. Requests then go through the pool, through the service, through HTTP and through gRPC.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.engines import open_engine, random_prompts
from benchmarks.harness import Cell, Report, Side, Turns, command_line, note, run, shown, take_turns
from benchmarks.host_clock import PARTS, Clock, lighten
from benchmarks.host_paths import FreePool
from benchmarks.peers.checkpoints import TINY, TINY_VOCAB
from decoding.decode_loop import stream
from decoding.sequence import Sequence
from engine.model import EngineModel
from experiments.stats.intervals import Interval, spread
from training.random_models import llama_config, random_model
from turnout.config import EngineConfig
from turnout.gc_freeze import freeze_loaded
from turnout.types import SamplingParams

RESULT = Path("docs/results/host.md")
PROMPT_TOKENS = 16
STEPS = 96  # that are measured, each of all rows that fit into one
FRONTS = ("service", "HTTP", "gRPC")
FIRST_US, ROW_US, CHUNK_US = 150.0, 3.0, 60.0  # goals: of a step in the engine, of a chunk in front of the pool


@dataclass(frozen=True, slots=True)
class Reading:
    """Of one turn, in seconds.

    Attributes:
        steps: forwards.
        chunks: that arrived; 0: a way that gives none.
        used_s: processor time of the process.
        passed_s: outside forwards.
        parts_s: of the parts of all steps.
    """

    steps: int
    chunks: int
    used_s: float
    passed_s: float
    parts_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Way:
    """A way of sending requests, up to their last token.

    Attributes:
        name: for the report.
        clock: of the model's steps.
        send: sends a number of requests at once and returns how many chunks arrived.
    """

    name: str
    clock: Clock
    send: Callable[[int], Awaitable[int]]

    async def measure(self, rows: int) -> Reading:
        """Send `rows` requests at once; the first token of each is not left out, its share is small."""
        clock = self.clock
        clock.clear()
        used, began = time.process_time(), time.perf_counter()
        chunks = await self.send(rows)
        used, passed = time.process_time() - used, time.perf_counter() - began
        return Reading(max(clock.steps, 1), chunks, used, passed - clock.forwards_s, dict(clock.seconds))


@asynccontextmanager
async def open_engine_ways(seconds: float) -> AsyncIterator[list[Way]]:
    """The engine's operations alone, and the method that streams in short stretches."""
    special = {"pad_token_id": 0, "eos_token_id": 1}
    config = llama_config(TINY_VOCAB, **TINY, max_position_embeddings=4096, **special)
    async with open_engine(random_model(config, seed=0)) as [model]:
        clock = Clock()
        lighten(model, clock, seconds)
        yield [
            Way("engine", clock, lambda rows: _decode(model, rows)),
            Way("method", clock, lambda rows: _stream(model, rows)),
        ]


@asynccontextmanager
async def open_pool_ways(seconds: float) -> AsyncIterator[list[Way]]:
    """The demo pair's small model through the pool, the service, HTTP and gRPC."""
    made = FreePool(STEPS, seconds)
    try:
        yield [
            Way("pool", made.clock, made.through_pool),
            Way("service", made.clock, made.through_service),
            Way("HTTP", made.clock, made.through_http),
            Way("gRPC", made.clock, made.through_grpc),
        ]
    finally:
        await made.close()


def _sequences(model: EngineModel, rows: int) -> list[Sequence]:
    sampling = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    return [Sequence(prompt, sampling, 0) for prompt in random_prompts(model.vocab_size, rows, PROMPT_TOKENS)]


async def _decode(model: EngineModel, rows: int) -> int:
    sequences = _sequences(model, rows)
    await asyncio.gather(*map(model.decode, sequences))
    for seq in sequences:
        model.release(seq)
    return 0


async def _stream(model: EngineModel, rows: int) -> int:
    async def read(seq: Sequence) -> int:
        count = 0
        async for _ in stream(model, seq):
            count += 1
        return count

    sequences = _sequences(model, rows)
    counts = await asyncio.gather(*map(read, sequences))
    for seq in sequences:
        model.release(seq)
    return sum(counts)


@dataclass(frozen=True, slots=True)
class Row:
    """Readings of one way at one number of rows, in microseconds of a step.

    Attributes:
        way: its name.
        rows: requests at once.
        step: processor time.
        elapsed: outside forwards.
        parts: of a step, by name.
        front: processor time beyond the pool's for a chunk that arrived; None: nothing is in front of the pool.
        chunks: that arrived of a request.
        goal: of `step`.
    """

    way: str
    rows: int
    step: Interval
    elapsed: Interval
    parts: dict[str, Interval]
    front: Interval | None
    chunks: float
    goal: float | None

    @property
    def rest(self) -> float:
        """What is outside the parts: the event loop, methods, texts, streams."""
        return self.step.value - sum(part.value for part in self.parts.values())


async def measured(ways: list[Way], rows: int, rounds: int) -> list[Row]:
    """All ways at one number of rows, in turns."""
    note(f"{rows} rows")
    turns = await take_turns([Side(way.name, partial(_turn, way, rows)) for way in ways], rounds)
    return [_row(turns, way.name, rows) for way in ways]


async def _turn(way: Way, rows: int, _: int) -> Reading:
    return await way.measure(rows)


def _row(turns: Turns[Reading], name: str, rows: int) -> Row:
    def of_step(seconds: Callable[[Reading], float]) -> Interval:
        return turns.spread(name, lambda reading: 1e6 * seconds(reading) / reading.steps)

    def of_part(part: str) -> Interval:
        return of_step(lambda reading: reading.parts_s[part])

    front = None
    if name in FRONTS:
        front = spread(turns.compared(name, "pool", lambda mine, pool: 1e6 * (mine.used_s - pool.used_s) / mine.chunks))
    goal = FIRST_US + ROW_US * rows if name == "engine" else None
    step, elapsed = of_step(lambda reading: reading.used_s), of_step(lambda reading: reading.passed_s)
    chunks = turns.spread(name, lambda reading: reading.chunks / rows).value
    return Row(name, rows, step, elapsed, {part: of_part(part) for part in PARTS}, front, chunks, goal)


async def measure(options: argparse.Namespace) -> Report:
    """Every way at every number of rows."""
    torch.set_num_threads(1)
    report = Report(
        "Host time of a step",
        f"`make bench-host`; forwards of {1e3 * options.forward:g} ms asleep, answers of {STEPS} tokens, greedy;"
        f" microseconds of a step, `step` and `front` of processor time, median of {options.rounds} rounds"
        " [smallest, largest].",
    )
    rows: list[Row] = []
    for opened in (open_engine_ways, open_pool_ways):
        async with opened(options.forward) as ways:
            freeze_loaded()  # as processes that serve do
            for count in options.at:
                rows += await measured(ways, count, options.rounds)
    columns: dict[str, Callable[[Row], Cell]] = {
        "way": lambda row: row.way,
        "rows": lambda row: row.rows,
        "step": lambda row: shown(row.step),
        "goal": lambda row: "" if row.goal is None else f"{row.goal:.0f}",
        **{part: partial(_part, part) for part in PARTS},
        "rest": lambda row: f"{row.rest:.0f}",
        "elapsed": lambda row: shown(row.elapsed),
        "chunks": lambda row: "" if row.front is None else f"{row.chunks:.0f}",
        "front, a chunk": lambda row: "" if row.front is None else shown(row.front),
    }
    report.table("steps", rows, columns)
    report.text(
        "Parts are the engine's: `launch` lays a step out and calls its layers; `rest` is the event loop, the method,"
        " texts and streams. `elapsed` is what passed outside forwards. `front` is what a way takes beyond the pool for"
        f" a chunk that arrives (goal: {CHUNK_US:g}). `chunks` are a request's: streams share a budget of them, so"
        " where there are few, `front` is mostly what reading a request and ending it take. Goals are of `step`:"
        f" {FIRST_US:g} and {ROW_US:g} a row. A step holds {EngineConfig().max_batch} rows; those beyond wait."
    )
    return report


def _part(part: str, row: Row) -> Cell:
    return f"{row.parts[part].value:.0f}"


def parser() -> argparse.ArgumentParser:
    """Make the options."""
    made = command_line(__doc__, RESULT, rounds=3, at=[1, 32])
    made.add_argument("--at", type=int, nargs="+", default=[1, 8, 32, 64, 256], help="rows; absent: 1 8 32 64 256")
    made.add_argument("--forward", type=float, default=0.0, help="seconds that a forward takes, asleep; absent: 0")
    return made


if __name__ == "__main__":
    run(parser(), measure)
