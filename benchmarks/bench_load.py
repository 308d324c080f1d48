"""Latency and goodput of the server against offered load, with arrivals that do not wait for answers.

The server, the generator and this program are processes of their own. Rates are shares of a capacity measured
first: how fast the server answers a pile of requests that come at once.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness import Report, command_line, note, run
from benchmarks.load_table import Sweep, page
from benchmarks.served import running_server
from experiments import machine
from experiments.load.metrics import Objective, Summary, summarise
from experiments.load.records import LoadResult, Plan
from experiments.pairs import open_pair
from experiments.process_cpu import cpu_seconds
from experiments.process_memory import tree
from training.data.arithmetic import MIDDLE_DIFFICULTY, heldout
from turnout.config import TurnoutConfig
from turnout.free_ports import on_free_ports

NUM_PROMPTS = 400
WARM_UP = 16
PILE = 96
# Client, schedule, and the offered rate as a share of capacity.
RUNS = [
    *(("grpc", "poisson", share) for share in (0.25, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5)),
    *(("grpc", schedule, 0.7) for schedule in ("constant", "bursts")),
    *(("http", "poisson", share) for share in (0.5, 0.7)),
]
QUICK_RUNS = [("grpc", "poisson", 0.5), ("http", "poisson", 0.5), ("grpc", "poisson", 1.2)]


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: what the client saw, and cores the server's processes used meanwhile."""

    summary: Summary
    server_cpu: float


class LoadBench:
    """Runner of plans against a running server.

    Args:
        config: the server's.
        server_pid: its first process.
        max_tokens: longest answer.
        objective: what counts as a good answer.
    """

    def __init__(self, config: TurnoutConfig, server_pid: int, max_tokens: int, objective: Objective) -> None:
        server = config.server
        self._addresses = {"grpc": f"127.0.0.1:{server.grpc_port}", "http": f"127.0.0.1:{server.http_port}"}
        self._pool = next(iter(config.pools))
        self._server_pid = server_pid
        self._max_tokens = max_tokens
        self._objective = objective
        self._prompts = tuple(problem.prompt for problem in heldout(MIDDLE_DIFFICULTY, NUM_PROMPTS))

    def run(self, client: str, schedule: str, rate: float, duration_s: float, seed: int = 0) -> Measured:
        """One run of the generator in a process of its own."""
        plan = Plan(
            client=client,
            address=self._addresses[client],
            schedule=schedule,
            rate=rate,
            duration_s=duration_s,
            seed=seed,
            prompts=self._prompts,
            model=self._pool,
            max_tokens=self._max_tokens,
        )
        pids = tree(self._server_pid)
        before, started = cpu_seconds(pids), time.monotonic()
        command = [sys.executable, "-m", "experiments.load.generator"]
        finished = subprocess.run(
            command, input=json.dumps(asdict(plan)), stdout=subprocess.PIPE, text=True, check=True
        )
        used = (cpu_seconds(pids) - before) / (time.monotonic() - started)
        return Measured(summarise(LoadResult.from_dict(json.loads(finished.stdout)), self._objective), used)

    def capacity(self) -> float:
        """Requests a second when they come all at once; the run before it warms the server up."""
        self.run("grpc", "at once", WARM_UP, 1.0)
        pile = self.run("grpc", "at once", PILE, 1.0).summary
        if not pile.end_to_end_s:
            raise RuntimeError(f"the server answered none of {pile.requests} requests: {pile.errors}")
        return pile.answered / max(pile.end_to_end_s.values())


def sweep(bench: LoadBench, runs: list[tuple[str, str, float]], duration_s: float) -> tuple[float, list[Measured]]:
    """Capacity, then all runs, each with arrivals of its own."""
    capacity = bench.capacity()
    measured = []
    for number, (client, schedule, share) in enumerate(runs):
        rate = share * capacity
        note(f"{client}, {schedule}, {rate:.1f} requests/s")
        measured.append(bench.run(client, schedule, rate, duration_s, seed=number))
    return capacity, measured


def measure(options: argparse.Namespace) -> Report:
    """Sweep the rates against a server of its own."""
    config = on_free_ports(open_pair(options.pair).config)
    objective, facts = Objective(options.ttft, options.tpot), machine.describe()
    with running_server(config) as (pid, _):
        bench = LoadBench(config, pid, options.max_tokens, objective)
        capacity, measured = sweep(bench, QUICK_RUNS if options.quick else RUNS, options.duration)
    found = Sweep(
        machine=facts,
        pool=next(iter(config.pools)),
        objective=objective,
        duration_s=options.duration,
        max_tokens=options.max_tokens,
        capacity=capacity,
        runs=[run.summary for run in measured],
        server_cpu=[run.server_cpu for run in measured],
    )
    return page(found)


def parser() -> argparse.ArgumentParser:
    """Make the options."""
    made = command_line(__doc__, Path("docs/results/load.md"), rounds=None, takes_pair=True, duration=5.0)
    made.add_argument("--config", dest="pair", help="the same as --pair")
    made.add_argument("--duration", type=float, default=30.0, help="seconds of a run's schedule; 5 with --quick")
    made.add_argument("--max-tokens", type=int, default=128)
    made.add_argument("--ttft", type=float, default=0.5, help="objective: time to first token, seconds")
    made.add_argument("--tpot", type=float, default=0.05, help="objective: time per output token, seconds")
    return made


if __name__ == "__main__":
    run(parser(), measure)
