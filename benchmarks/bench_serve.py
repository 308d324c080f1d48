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
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvloop

from benchmarks.harness import note, publish
from benchmarks.peers.checkpoints import random_checkpoint
from benchmarks.served import on_free_ports, running_server
from engine.pool import LocalPool
from experiments.machine import describe, one_line
from experiments.process_memory import proportional_bytes, tree
from experiments.statistics import Interval, spread
from training.data.arithmetic import MIDDLE_DIFFICULTY, heldout
from turnout.calls import Chunk, GenerateCall
from turnout.client import AsyncClient
from turnout.config import ModelConfig, PoolConfig, TurnoutConfig
from turnout.types import SamplingParams

GOALS = {8: 0.7, 32: 0.85}
MEMORY_GOAL_BYTES = 3 * 10**9
RESULT = Path("docs/results/serve.md")
RANDOM = "random-220m"
SAMPLING: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "seed": 0}
METHODS: dict[str, dict[str, Any]] = {
    "plain, large": {"method": "plain", "params": {"model": "large"}},
    "plain, small": {"method": "plain", "params": {"model": "small"}},
    "entropy_adaptive": {"method": "entropy_adaptive", "params": {}},
    "speculative": {"method": "speculative", "params": {}},
}
# What a pool is asked for; random weights have nothing to agree on.
SUBJECTS: dict[str, tuple[str, ...]] = {"demo": tuple(METHODS), RANDOM: ("plain, large",)}


@dataclass(frozen=True, slots=True)
class Run:
    """Concurrent streams: tokens per second overall, and the median time to the first token, seconds."""

    tokens_per_s: float
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One method on one pool under so many streams, over several rounds; ratios by the way of streaming."""

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


async def compare(config: TurnoutConfig, counts: tuple[int, ...], rounds: int, tokens: int) -> list[Comparison]:
    """Take turns; the first round of each subject warms all sides up and is thrown away."""
    prompts = [problem.prompt for problem in heldout(MIDDLE_DIFFICULTY, max(counts))]
    found = []
    url, limits = f"http://127.0.0.1:{config.server.http_port}", httpx.Limits(max_connections=None)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(f"127.0.0.1:{config.server.grpc_port}"))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=300, limits=limits))
        for name in config.pools:
            pool = LocalPool.load(name, config)
            ways = {"in process": in_process(pool), "gRPC": over_grpc(client, name), "SSE": over_http(http, name)}
            for streams in counts:
                for method in SUBJECTS[name]:
                    note(f"{name}, {method}, {streams} streams")
                    turns = [
                        {way: await _turn(ways[way], prompts[:streams], tokens, method) for way in ways}
                        for _ in range(rounds + 1)
                    ]
                    found.append(_comparison(name, method, streams, turns[1:]))
            await pool.close()
    return found


def _turn(stream: Stream, prompts: list[str], tokens: int, method: str) -> Awaitable[Run]:
    return concurrent(stream, prompts, tokens, METHODS[method])


def _comparison(pool: str, method: str, streams: int, turns: list[dict[str, Run]]) -> Comparison:
    alone = [turn["in process"] for turn in turns]
    ways = [way for way in turns[0] if way != "in process"]
    ratios = {way: spread([turn[way].tokens_per_s / turn["in process"].tokens_per_s for turn in turns]) for way in ways}
    firsts = {way: spread([turn[way].ttft_s for turn in turns]) for way in turns[0]}
    return Comparison(pool, method, streams, spread([run.tokens_per_s for run in alone]), ratios, firsts)


def to_markdown(
    found: list[Comparison], start_s: float, memory: int, rounds: int, tokens: int, machine: dict[str, str]
) -> str:
    """The table, with how it was obtained."""
    goals = ", ".join(f"{goal:g} at {streams}" for streams, goal in GOALS.items())
    text = [
        "# Streaming through Serve against the engine in process",
        "",
        f"`make bench`; {tokens} tokens a stream, half as many with {RANDOM}, greedy, median of {rounds} rounds"
        " [smallest, largest], each in process, over gRPC and over SSE in this order;"
        f" clients, front end and engine share the cores. {one_line(machine)}. {RANDOM}: a Llama of random weights."
        f" Goals: {goals} streams.",
        "",
        "| pool | method | streams | in process, tokens/s | gRPC | SSE | met | TTFT in process, gRPC, SSE, ms |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- | ---: |",
    ]
    for line in found:
        met = "yes" if min(ratio.value for ratio in line.ratios.values()) >= GOALS[line.streams] else "no"
        firsts = ", ".join(f"{first.value * 1e3:.0f}" for first in line.ttft_s.values())
        text.append(
            f"| {line.pool} | {line.method} | {line.streams} | {line.in_process.value:.0f} "
            f"| {_ratio(line.ratios['gRPC'])} | {_ratio(line.ratios['SSE'])} | {met} | {firsts} |"
        )
    met = "yes" if memory < MEMORY_GOAL_BYTES else "no"
    return "\n".join(
        [
            *text,
            "",
            f"All processes of the server of the demo pair together, after the load: {memory / 1e9:.2f} GB proportional"
            f" set size (goal below {MEMORY_GOAL_BYTES / 1e9:.0f} GB: {met}). From the command to the first answer:"
            f" {start_s:.1f} s.",
            "",
        ]
    )


def _ratio(ratio: Interval) -> str:
    return f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def random_config(folder: Path) -> TurnoutConfig:
    """A pool of the random model alone, in bfloat16."""
    path = str(random_checkpoint("220 M", folder))
    model = ModelConfig(path=path, dtype="bfloat16", kv_memory_bytes=512 << 20)
    return TurnoutConfig(models={"random": model}, pools={RANDOM: PoolConfig(small="random", large="random")})


def main(counts: tuple[int, ...], rounds: int, tokens: int, out: Path | None) -> None:
    """Measure, print, and save where there is a place for it."""
    machine = describe()
    config = on_free_ports(TurnoutConfig.demo())
    with running_server(config) as (pid, start_s):
        found = uvloop.run(compare(config, counts, rounds, tokens))
        memory = proportional_bytes(tree(pid))
    with tempfile.TemporaryDirectory(prefix="turnout-serve-") as folder:
        config = on_free_ports(random_config(Path(folder)))
        with running_server(config):
            found += uvloop.run(compare(config, counts, rounds, tokens // 2))
    text = to_markdown(found, start_s, memory, rounds, tokens, machine)
    publish(text, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round, results printed and not saved")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--out", type=Path, help=f"absent: {RESULT}, nowhere with --quick")
    chosen = parser.parse_args()
    if chosen.quick:
        main((8,), 1, 32, chosen.out)
    else:
        main(tuple(GOALS), chosen.rounds, chosen.tokens, chosen.out or RESULT)
