"""What telling of itself costs a server: throughput with traces, logs and audits, beside the same server without.

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
import uvloop

from benchmarks.harness import note, publish
from benchmarks.served import on_free_ports, running_server
from experiments.machine import describe, one_line
from experiments.process_cpu import cpu_seconds
from experiments.process_memory import tree
from experiments.statistics import Interval, median_interval, spread
from training.data.arithmetic import MIDDLE_DIFFICULTY, heldout
from turnout.calls import ChatMessage
from turnout.client import AsyncClient
from turnout.config import TurnoutConfig
from turnout.telemetry_config import AuditConfig, LogsConfig, TelemetryConfig, TracesConfig

RESULT = Path("docs/results/telemetry.md")
GOAL = 0.02
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
class Side:
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

    side: Side
    config: TurnoutConfig
    pid: int


def sides(folder: Path) -> list[Side]:
    """What is compared; the first one is what the others are compared with."""

    def traces(share: float) -> TracesConfig:
        return TracesConfig(share=share, path=str(folder / f"traces-{share:g}"))

    logs = LogsConfig(path=str(folder / "requests.jsonl"))
    return [
        Side(SILENT, TelemetryConfig(), UNCOUNTED),
        Side("metrics, traces of 1%", TelemetryConfig(traces=traces(0.01))),
        Side(
            "and logs, and audits of 1%",
            TelemetryConfig(traces=traces(0.01), logs=logs, audit=AuditConfig(share=0.01)),
        ),
        Side("metrics, traces of all", TelemetryConfig(traces=traces(1.0))),
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
                    messages=messages, method="speculative", temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=0
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


async def measure(servers: list[Server], turns: int, rounds: int, tokens: int) -> list[list[Run]]:
    """Every side in every turn; the first turn warms up and is thrown away."""
    found: list[list[Run]] = []
    for turn in range(turns + 1):
        # Each side is first, second and so on equally often, so that a machine that tires favours none.
        order = [(turn + place) % len(servers) for place in range(len(servers))]
        runs = {place: await work(servers[place], rounds, tokens) for place in order}
        shown = ", ".join(f"{runs[place].tokens_per_s:.0f}" for place in range(len(servers)))
        note(f"turn {turn} of {turns}: {shown} tokens/s")
        if turn:
            found.append([runs[place] for place in range(len(servers))])
    return found


def page(names: list[str], found: list[list[Run]], rounds: int, tokens: int, machine: dict[str, str]) -> str:
    """The table, with how it was obtained."""
    text = [
        "# What telemetry costs",
        "",
        f"`make bench-telemetry`; demo pair, `speculative`, greedy, {STREAMS} streams over gRPC, {rounds} requests of"
        f" {tokens} tokens each, {len(found)} turns in changing order, forwards of one"
        " thread. Tokens/s and CPU: median [smallest, largest]."
        " Differences: median [95% interval] of the turns, each beside the server in the same turn that tells nothing"
        f" and counts nothing; that of all others is scraped every {SCRAPE_S:g} s. Goal: at most {100 * GOAL:.0f}% less"
        " throughput with metrics and traces of 1%. It is met where the whole interval says so, missed where none of"
        " it does, and open otherwise.",
        "",
        f"Machine: {one_line(machine)}.",
        "",
        "| the server tells | tokens/s | less | goal met | CPU s for 1,000 tokens | more |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for place, name in enumerate(names):
        speed = spread([turn[place].tokens_per_s for turn in found])
        cpu = spread([turn[place].cpu_s for turn in found])
        if not place:
            text.append(f"| {name} | {_number(speed, 0)} | | | {_number(cpu, 2)} | |")
            continue
        slower = median_interval([1 - turn[place].tokens_per_s / turn[0].tokens_per_s for turn in found])
        dearer = median_interval([turn[place].cpu_s / turn[0].cpu_s - 1 for turn in found])
        met = verdict(slower, len(found)) if place == 1 else ""
        costs = f"{_number(cpu, 2)} | {_percent(dearer)}"
        text.append(f"| {name} | {_number(speed, 0)} | {_percent(slower)} | {met} | {costs} |")
    return "\n".join([*text, ""])


def verdict(slower: Interval, turns: int) -> str:
    """Whether a difference is within the goal, as far as its interval tells."""
    if turns < LEAST_TURNS:
        return "open"
    return "yes" if slower.high <= GOAL else "no" if slower.low > GOAL else "open"


def _number(value: Interval, digits: int) -> str:
    return f"{value.value:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def _percent(value: Interval) -> str:
    return f"{100 * value.value:.1f}% [{100 * value.low:.1f}, {100 * value.high:.1f}]"


def main(turns: int, rounds: int, tokens: int, out: Path | None) -> None:
    """Measure, print, and save where there is a place for it."""
    machine = describe()
    with tempfile.TemporaryDirectory(prefix="turnout-telemetry-") as folder, ExitStack() as stack:
        servers = []
        demo = TurnoutConfig.demo()
        engine = demo.engine.model_copy(update={"threads": 1})
        for side in sides(Path(folder)):
            config = on_free_ports(demo.model_copy(update={"telemetry": side.telemetry, "engine": engine}))
            pid, _ = stack.enter_context(running_server(config, side.program))
            servers.append(Server(side, config, pid))
        found = uvloop.run(measure(servers, turns, rounds, tokens))
    text = page([server.side.name for server in servers], found, rounds, tokens, machine)
    publish(text, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two short turns, results printed and not saved")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, help=f"absent: {RESULT}, nowhere with --quick")
    chosen = parser.parse_args()
    if chosen.quick:
        main(2, 1, 32, chosen.out)
    else:
        main(chosen.turns, chosen.rounds, chosen.tokens, chosen.out or RESULT)
