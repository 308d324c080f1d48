"""Cost of telemetry: a server's throughput with traces, logs and audits, compared with the same server without them.

Servers run on this machine and take turns: while one works the others are idle. The one that the others are compared
with counts nothing either: `scripts/serve_uncounted.py` takes the counting out of its ingress. The others are scraped
while they work. Turns are short and many, their order changes, and only runs of the same turn are compared, by the
median: what else the machine does slows a turn down by half at times, and is no cost of telemetry. A forward has one
thread: how many serve best a server tries out as it works, each of them for itself, and that is not to be compared.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.harness import Goal, Report, Side, Turns, command_line, note, run, shown, take_turns
from benchmarks.served import running_server
from experiments.pairs import open_pair
from experiments.process_cpu import cpu_seconds
from experiments.process_memory import tree
from experiments.stats.intervals import Interval, median_interval
from training.data.arithmetic import MIDDLE_DIFFICULTY, heldout
from turnout.calls import ChatMessage
from turnout.client import AsyncClient
from turnout.config import TurnoutConfig
from turnout.free_ports import on_free_ports
from turnout.telemetry_config import AuditConfig, LogsConfig, TelemetryConfig, TracesConfig

GOAL = Goal(0.02, at_most=True)
LEAST_TURNS = 8  # the interval of fewer says nothing
STREAMS = 16
SCRAPE_S = 1.0  # fifteen times as often as ops/prometheus/prometheus.yml
SILENT = "nothing, and counts nothing"
UNCOUNTED = "scripts.serve_uncounted"


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens per second, and CPU seconds of all processes of the server for 1,000 tokens."""

    tokens_per_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Tells:
    """A server.

    Attributes:
        name: what it tells of itself.
        telemetry: the same as configuration.
        program: the module that serves.
    """

    name: str
    telemetry: TelemetryConfig
    program: str = "cli.main"

    @property
    def scraped(self) -> bool:
        """Whether its metrics are read while it works."""
        return self.program != UNCOUNTED


@dataclass(frozen=True, slots=True)
class Server:
    """One that runs."""

    side: Tells
    config: TurnoutConfig
    pid: int


def sides(folder: Path) -> list[Tells]:
    """What is compared; the first one is what the others are compared with."""

    def traces(share: float) -> TracesConfig:
        return TracesConfig(share=share, path=str(folder / f"traces-{share:g}"))

    logs = LogsConfig(path=str(folder / "requests.jsonl"))
    return [
        Tells(SILENT, TelemetryConfig(), UNCOUNTED),
        Tells("metrics, traces of 1%", TelemetryConfig(traces=traces(0.01))),
        Tells(
            "and logs, and audits of 1%",
            TelemetryConfig(traces=traces(0.01), logs=logs, audit=AuditConfig(share=0.01)),
        ),
        Tells("metrics, traces of all", TelemetryConfig(traces=traces(1.0))),
    ]


async def work(server: Server, rounds: int, tokens: int) -> Run:
    """`rounds` requests on each of STREAMS streams."""
    config = server.config
    prompts = [problem.prompt for problem in heldout(MIDDLE_DIFFICULTY, STREAMS)]
    async with AsyncClient(f"127.0.0.1:{config.server.grpc_port}") as client:

        async def stream(number: int) -> int:
            count = 0
            for _ in range(rounds):
                messages = [ChatMessage("user", prompts[number])]
                async with client.stream(
                    messages=messages,
                    method="speculative",
                    params={"length": "fixed"},
                    temperature=0.0,
                    max_tokens=tokens,
                    ignore_eos=True,
                    seed=0,
                ) as chunks:
                    async for chunk in chunks:
                        count += len(chunk.tokens)
            return count

        scraper = asyncio.create_task(_scrape(config)) if server.side.scraped else None
        processes = tree(server.pid)
        spent, started = cpu_seconds(processes), time.perf_counter()
        counts = await asyncio.gather(*(stream(number) for number in range(STREAMS)))
        seconds, spent = time.perf_counter() - started, cpu_seconds(processes) - spent
        if scraper is not None:
            scraper.cancel()
            await asyncio.gather(scraper, return_exceptions=True)
    return Run(sum(counts) / seconds, 1000 * spent / sum(counts))


async def _scrape(config: TurnoutConfig) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{config.server.http_port}", timeout=30) as http:
        while True:
            (await http.get("/metrics")).raise_for_status()
            await asyncio.sleep(SCRAPE_S)


@dataclass(frozen=True, slots=True)
class Cost:
    """A server, and how much slower and dearer it is than the silent one of the same turn; None: that one itself."""

    name: str
    tokens_per_s: Interval
    cpu_s: Interval
    slower: Interval | None
    dearer: Interval | None


def cost(name: str, turns: Turns[Run]) -> Cost:
    """What one server's turns come to."""
    speed, cpu = turns.spread(name, lambda run: run.tokens_per_s), turns.spread(name, lambda run: run.cpu_s)
    if name == SILENT:
        return Cost(name, speed, cpu, None, None)
    slower = turns.compared(name, SILENT, lambda mine, silent: 1 - mine.tokens_per_s / silent.tokens_per_s)
    dearer = turns.compared(name, SILENT, lambda mine, silent: mine.cpu_s / silent.cpu_s - 1)
    return Cost(name, speed, cpu, median_interval(slower), median_interval(dearer))


async def measure(options: argparse.Namespace) -> Report:
    """Every server in every turn."""
    pair = open_pair(options.pair)
    report = Report(
        "What telemetry costs",
        f"`make bench-telemetry`; {pair.title}, `speculative`, greedy, {STREAMS} streams over gRPC, {options.requests}"
        f" requests of {options.tokens} tokens each, {options.rounds} turns in changing order, forwards of one thread."
        " Tokens/s and CPU: median [smallest, largest]. Differences: median [95% interval] of the turns, each with the"
        " server in the same turn that tells nothing and counts nothing; that of all others is scraped every"
        f" {SCRAPE_S:g} s. Goal: at most {GOAL.value:.0%} less throughput with metrics and traces of 1%. It is met"
        " where the whole interval says so, missed where none of it does, and open otherwise.",
    )
    with tempfile.TemporaryDirectory(prefix="turnout-telemetry-") as folder, ExitStack() as stack:
        servers = []
        engine = pair.config.engine.model_copy(update={"threads": 1})
        for side in sides(Path(folder)):
            config = on_free_ports(pair.config.model_copy(update={"telemetry": side.telemetry, "engine": engine}))
            pid, _ = stack.enter_context(running_server(config, side.program))
            servers.append(Server(side, config, pid))
        turns = await take_turns([_side(server, options) for server in servers], options.rounds)
    first = servers[1].side.name  # the one that the goal is for
    sure = options.rounds >= LEAST_TURNS

    def met(row: Cost) -> str | None:
        if row.name != first or row.slower is None:
            return None
        return GOAL.surely_met(row.slower) if sure else "open"

    columns = {
        "the server tells": lambda row: row.name,
        "tokens/s": lambda row: shown(row.tokens_per_s),
        "less": lambda row: shown(row.slower, 1, 100, "%") if row.slower else None,
        "goal met": met,
        "CPU s for 1,000 tokens": lambda row: shown(row.cpu_s, 2),
        "more": lambda row: shown(row.dearer, 1, 100, "%") if row.dearer else None,
    }
    report.table("costs", [cost(name, turns) for name in turns.readings], columns)
    return report


def _side(server: Server, options: argparse.Namespace) -> Side[Run]:
    async def turn(number: int) -> Run:
        made = await work(server, options.requests, options.tokens)
        note(f"turn {number} of {options.rounds}, {server.side.name}: {made.tokens_per_s:.0f} tokens/s")
        return made

    return Side(server.side.name, turn)


if __name__ == "__main__":
    parser = command_line(__doc__, Path("docs/results/telemetry.md"), rounds=40, takes_pair=True, requests=1, tokens=32)
    parser.add_argument("--requests", type=int, default=2, help="of each stream in a turn")
    parser.add_argument("--tokens", type=int, default=128)
    run(parser, measure)
