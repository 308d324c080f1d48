"""Streaming through Serve against the engine in process: the same requests, the same machine, taking turns.

The server runs as `turnout serve` in processes of its own; the in-process engine is a second copy of the models
in this process. While one side works the other is idle.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from engine.pool import LocalPool
from experiments.process_memory import proportional_bytes, tree
from experiments.report import show
from experiments.served import on_free_ports, running_server
from experiments.statistics import Interval, spread
from training.data.arithmetic import MIDDLE_DIFFICULTY, heldout
from turnout.calls import ChatMessage, Chunk, GenerateCall
from turnout.client import AsyncClient
from turnout.config import TurnoutConfig
from turnout.types import SamplingParams

STREAMS = 8
GOAL = 0.7
MEMORY_GOAL_BYTES = 3 * 10**9
RESULT = Path("docs/results/serve.md")
SUBJECTS: dict[str, dict[str, Any]] = {
    "plain, large": {"method": "plain", "params": {"model": "large"}},
    "plain, small": {"method": "plain", "params": {"model": "small"}},
    "entropy_adaptive": {"method": "entropy_adaptive", "params": {}},
    "speculative": {"method": "speculative", "params": {}},
}


@dataclass(frozen=True, slots=True)
class Run:
    """Eight concurrent streams: tokens per second overall, and the median time to the first token, seconds."""

    tokens_per_s: float
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both sides over several rounds."""

    subject: str
    in_process: Interval
    served: Interval
    ratio: Interval
    ttft_s: Interval


async def eight_streams(stream: Callable[[int], AsyncIterator[Chunk]]) -> Run:
    """Start all streams at once and read them to the end."""
    started = time.perf_counter()

    async def read(number: int) -> tuple[int, float]:
        tokens, first = 0, 0.0
        async for chunk in stream(number):
            first = first or time.perf_counter() - started
            tokens += len(chunk.tokens)
        return tokens, first

    results = await asyncio.gather(*(read(number) for number in range(STREAMS)))
    elapsed = time.perf_counter() - started
    firsts = sorted(first for _, first in results)
    return Run(sum(tokens for tokens, _ in results) / elapsed, firsts[len(firsts) // 2])


def in_process(pool: LocalPool, prompts: list[str], tokens: int, subject: dict[str, Any]) -> Awaitable[Run]:
    """The engine, without a server."""

    async def stream(number: int) -> AsyncIterator[Chunk]:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=0)
        messages = (ChatMessage("user", prompts[number]),)
        call = GenerateCall(f"bench-{number}", pool.name, sampling, messages=messages, **subject)
        async for event in pool.generate(call):
            if isinstance(event, Chunk):
                yield event

    return eight_streams(stream)


def served(client: AsyncClient, prompts: list[str], tokens: int, subject: dict[str, Any]) -> Awaitable[Run]:
    """The same through gRPC."""

    async def stream(number: int) -> AsyncIterator[Chunk]:
        messages = [ChatMessage("user", prompts[number])]
        options: dict[str, Any] = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "seed": 0, **subject}
        async with client.stream(messages=messages, **options) as chunks:
            async for chunk in chunks:
                yield chunk

    return eight_streams(stream)


async def compare(config: TurnoutConfig, rounds: int, tokens: int) -> list[Comparison]:
    """Take turns; the first round of each subject warms both sides up and is thrown away."""
    prompts = [problem.prompt for problem in heldout(MIDDLE_DIFFICULTY, STREAMS)]
    pool = LocalPool.load("demo", config)
    comparisons = []
    async with AsyncClient(f"127.0.0.1:{config.server.grpc_port}") as client:
        for name, subject in SUBJECTS.items():
            pairs = []
            for _ in range(rounds + 1):
                alone = await in_process(pool, prompts, tokens, subject)
                pairs.append((alone, await served(client, prompts, tokens, subject)))
            pairs = pairs[1:]
            comparisons.append(
                Comparison(
                    name,
                    spread([alone.tokens_per_s for alone, _ in pairs]),
                    spread([remote.tokens_per_s for _, remote in pairs]),
                    spread([remote.tokens_per_s / alone.tokens_per_s for alone, remote in pairs]),
                    spread([remote.ttft_s for _, remote in pairs]),
                )
            )
    await pool.close()
    return comparisons


def to_markdown(lines: list[Comparison], start_s: float, memory: int, rounds: int, tokens: int) -> str:
    """The table, with how it was obtained."""
    text = [
        f"# gRPC streaming through Serve against the engine in process ({STREAMS} concurrent streams)",
        "",
        f"`make bench`; demo pair, {tokens} tokens a stream, greedy, median of {rounds} alternating rounds"
        " [smallest, largest].",
        "",
        "| method | in process, tokens/s | served, tokens/s | ratio | goal | met | served TTFT, ms |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for line in lines:
        met = "yes" if line.ratio.value >= GOAL else "no"
        text.append(
            f"| {line.subject} | {line.in_process.value:.0f} | {line.served.value:.0f} "
            f"| {line.ratio.value:.2f} [{line.ratio.low:.2f}, {line.ratio.high:.2f}] | {GOAL:.1f} | {met} "
            f"| {line.ttft_s.value * 1e3:.0f} |"
        )
    met = "yes" if memory < MEMORY_GOAL_BYTES else "no"
    return "\n".join(
        [
            *text,
            "",
            f"All processes of the server together, after the load: {memory / 1e9:.2f} GB proportional set size"
            f" (goal below {MEMORY_GOAL_BYTES / 1e9:.0f} GB: {met}). From the command to the first answer:"
            f" {start_s:.1f} s.",
            "",
        ]
    )


def main(rounds: int, tokens: int, out: Path | None) -> None:
    """Measure, print, and save where there is a place for it."""
    config = on_free_ports(TurnoutConfig.demo())
    with running_server(config) as (pid, start_s):
        lines = uvloop.run(compare(config, rounds, tokens))
        memory = proportional_bytes(tree(pid))
    text = to_markdown(lines, start_s, memory, rounds, tokens)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
    show(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round, results printed and not saved")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--out", type=Path, help=f"absent: {RESULT}, nowhere with --quick")
    chosen = parser.parse_args()
    if chosen.quick:
        main(1, 32, chosen.out)
    else:
        main(chosen.rounds, chosen.tokens, chosen.out or RESULT)
