"""Streaming through Serve against the engine in process: the same requests, the same machine, taking turns.

The server runs as `turnout serve` in processes of its own; the in-process engine is a second copy of the models
in this process. While one side works the others are idle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness import Goal, Report, Side, command_line, note, run, shown, take_turns
from benchmarks.peers.checkpoints import random_checkpoint
from benchmarks.served import running_server
from experiments.pairs import open_pair
from experiments.process_memory import proportional_bytes, tree
from experiments.stats.intervals import Interval
from pool.local_pool import LocalPool
from training.data.arithmetic import MIDDLE_DIFFICULTY, heldout
from turnout.calls import Chunk, GenerateCall
from turnout.client import AsyncClient
from turnout.config import ModelConfig, PoolConfig, TurnoutConfig
from turnout.free_ports import on_free_ports
from turnout.types import SamplingParams

GOALS = {8: Goal(0.7), 32: Goal(0.85)}  # by streams
MEMORY_GOAL = Goal(3 * 10**9, at_most=True)
ALONE, WAYS = "in process", ("gRPC", "SSE")
RANDOM = "random-220m"
SAMPLING: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "seed": 0}
METHODS: dict[str, dict[str, Any]] = {
    "plain, large": {"method": "plain", "params": {"model": "large"}},
    "plain, small": {"method": "plain", "params": {"model": "small"}},
    "entropy_adaptive": {"method": "entropy_adaptive", "params": {}},
    "speculative": {"method": "speculative", "params": {}},
}
# What a pool of random weights is asked for: they have nothing to agree on.
PLAIN = ("plain, large",)


@dataclass(frozen=True, slots=True)
class Run:
    """Concurrent streams: tokens per second overall, and the median time to the first token, seconds."""

    tokens_per_s: float
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One method on one pool under a number of streams, over several rounds; ratios by the way of streaming."""

    pool: str
    method: str
    streams: int
    in_process: Interval
    ratios: dict[str, Interval]
    ttft_s: dict[str, Interval]


Stream = Callable[[str, int, dict[str, Any]], AsyncIterator[int]]


async def concurrent(stream: Stream, prompts: list[str], tokens: int, method: dict[str, Any]) -> Run:
    """Start all streams at once and read them to the end.

    Raises:
        RuntimeError: a stream brought another number of tokens.
    """
    started = time.perf_counter()

    async def read(prompt: str) -> float:
        got, first = 0, 0.0
        async for count in stream(prompt, tokens, method):
            first = first or time.perf_counter() - started
            got += count
        if got != tokens:
            raise RuntimeError(f"{got} tokens came, {tokens} were asked for")
        return first

    firsts = sorted(await asyncio.gather(*map(read, prompts)))
    return Run(len(prompts) * tokens / (time.perf_counter() - started), firsts[len(firsts) // 2])


def in_process(pool: LocalPool) -> Stream:
    """The engine, without a server."""

    async def stream(prompt: str, tokens: int, method: dict[str, Any]) -> AsyncIterator[int]:
        sampling = SamplingParams(**SAMPLING, max_tokens=tokens)
        call = GenerateCall(f"bench-{time.perf_counter_ns()}", pool.name, sampling, prompt, **method)
        async for event in pool.generate(call):
            if isinstance(event, Chunk):
                yield len(event.tokens)

    return stream


def over_grpc(client: AsyncClient, model: str) -> Stream:
    """The same through gRPC."""

    async def stream(prompt: str, tokens: int, method: dict[str, Any]) -> AsyncIterator[int]:
        options = {**SAMPLING, "max_tokens": tokens, **method}
        async with client.stream(prompt, model=model, **options) as chunks:
            async for chunk in chunks:
                yield len(chunk.tokens)

    return stream


def over_http(client: httpx.AsyncClient, model: str) -> Stream:
    """The same as server-sent events, which tell how many tokens there were at their end."""

    async def stream(prompt: str, tokens: int, method: dict[str, Any]) -> AsyncIterator[int]:
        body = {
            **SAMPLING,
            "model": model,
            "prompt": prompt,
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "decoding": method,
        }
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    usage = json.loads(line[6:]).get("usage")
                    yield usage["completion_tokens"] if usage else 0

    return stream


async def compare(config: TurnoutConfig, counts: list[int], rounds: int, tokens: int) -> list[Comparison]:
    """All ways in turn, for each method of each pool."""
    prompts = [problem.prompt for problem in heldout(MIDDLE_DIFFICULTY, max(counts))]
    found = []
    url, limits = f"http://127.0.0.1:{config.server.http_port}", httpx.Limits(max_connections=None)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(f"127.0.0.1:{config.server.grpc_port}"))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=300, limits=limits))
        for name in config.pools:
            pool = LocalPool.load(name, config)
            ways = {ALONE: in_process(pool), "gRPC": over_grpc(client, name), "SSE": over_http(http, name)}
            for streams in counts:
                for method in PLAIN if name == RANDOM else METHODS:
                    note(f"{name}, {method}, {streams} streams")
                    sides = [_side(way, stream, prompts[:streams], tokens, method) for way, stream in ways.items()]
                    turns = await take_turns(sides, rounds)
                    ratios = {way: turns.ratio(way, ALONE, lambda run: run.tokens_per_s) for way in WAYS}
                    firsts = {way: turns.spread(way, lambda run: run.ttft_s) for way in ways}
                    alone = turns.spread(ALONE, lambda run: run.tokens_per_s)
                    found.append(Comparison(name, method, streams, alone, ratios, firsts))
            await pool.close()
    return found


def _side(way: str, stream: Stream, prompts: list[str], tokens: int, method: str) -> Side[Run]:
    return Side(way, lambda _: concurrent(stream, prompts, tokens, METHODS[method]))


def random_config(folder: Path) -> TurnoutConfig:
    """A pool of the random model alone, in bfloat16."""
    path = str(random_checkpoint("220 M", folder))
    model = ModelConfig(path=path, dtype="bfloat16", kv_memory_bytes=512 << 20)
    return TurnoutConfig(models={"random": model}, pools={RANDOM: PoolConfig(small="random", large="random")})


async def measure(options: argparse.Namespace) -> Report:
    """A pair, then the random model."""
    pair = open_pair(options.pair)
    goals = ", ".join(f"{goal.value:g} at {streams}" for streams, goal in GOALS.items())
    report = Report(
        "Streaming through Serve against the engine in process",
        f"`make bench`; {options.tokens} tokens a stream, half as many with {RANDOM}, greedy, median of"
        f" {options.rounds} rounds [smallest, largest], in process, over gRPC and over SSE in turns; clients, front end"
        f" and engine share the cores. {RANDOM}: a Llama of random weights. Goals: {goals} streams.",
    )
    config = on_free_ports(pair.config)
    with running_server(config) as (pid, start_s):
        found = await compare(config, options.streams, options.rounds, options.tokens)
        memory = proportional_bytes(tree(pid))
    with tempfile.TemporaryDirectory(prefix="turnout-serve-") as folder:
        config = on_free_ports(random_config(Path(folder)))
        with running_server(config):
            found += await compare(config, options.streams, options.rounds, options.tokens // 2)
    columns = {
        "pool": lambda line: line.pool,
        "method": lambda line: line.method,
        "streams": lambda line: line.streams,
        "in process, tokens/s": lambda line: shown(line.in_process.value),
        "gRPC": lambda line: shown(line.ratios["gRPC"], 2),
        "SSE": lambda line: shown(line.ratios["SSE"], 2),
        "met": lambda line: GOALS[line.streams].met(min(ratio.value for ratio in line.ratios.values())),
        "TTFT in process, gRPC, SSE, ms": lambda line: ", ".join(
            shown(first.value, 0, 1000) for first in line.ttft_s.values()
        ),
    }
    report.table("comparisons", found, columns)
    report.values |= {"memory_bytes": memory, "start_s": start_s}
    report.text(
        f"All processes of the server of the {pair.title} together, after the load: {memory / 1e9:.2f} GB proportional"
        f" set size (goal at most {MEMORY_GOAL.value / 1e9:.0f} GB: {MEMORY_GOAL.met(memory)}). From the command to the"
        f" first answer: {start_s:.1f} s."
    )
    return report


if __name__ == "__main__":
    parser = command_line(__doc__, Path("docs/results/serve.md"), takes_pair=True, streams=[8], tokens=32)
    parser.add_argument("--streams", type=int, nargs="+", choices=list(GOALS), default=list(GOALS))
    parser.add_argument("--tokens", type=int, default=256)
    run(parser, measure)
