"""The real model through the servers that people run: Turnout's, vLLM's and llama.cpp's, over HTTP.

All are asked by the same client in turns: first many requests at once, then requests that arrive at random times
and do not wait for answers, as many a second for each server.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bench_peers import PEERS_PYTHON, VLLM_PYTHON
from benchmarks.harness import Goal, Report, Side, Turns, command_line, note, run, shown, take_turns
from benchmarks.peer_servers import LLAMA, MAX_LENGTH, MODEL, VLLM, Neighbour, Size
from benchmarks.served import running_server
from experiments import real_model
from experiments.load.metrics import percentiles
from experiments.load.records import LoadResult, Plan
from experiments.machine import multiplies_bfloat16
from training.data import real_text
from turnout.config import TurnoutConfig
from turnout.free_ports import on_free_ports

RESULT = Path("docs/results/servers.md")
OURS, OURS_INT4 = "Turnout", "Turnout, int4"
TITLES = {VLLM: "vLLM", LLAMA: "llama.cpp, GGUF as shipped"}
THREADS, SLOTS = 2, 32
PILE, WARM_UP = 32, 8
SHARE = 0.7  # of what vLLM answers a second: the rate at which requests arrive
RATE_GOAL = Goal(2.0)
LATE = 95  # percentile


@dataclass(frozen=True, slots=True)
class Reading:
    """What one turn found.

    Attributes:
        tokens_per_s: of a pile of requests at once.
        requests_per_s: likewise.
        open_tokens_per_s: of requests at random times, from the first arrival to the last output.
        ttft_s: time to the first token under it, by percentile; from the scheduled moment, in seconds.
        tpot_s: time per further token, likewise.
        failed: requests that got no answer.
    """

    tokens_per_s: float
    requests_per_s: float
    open_tokens_per_s: float
    ttft_s: dict[int, float]
    tpot_s: dict[int, float]
    failed: int


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs.

    Attributes:
        address: host and port.
        model: name to ask for.
    """

    address: str
    model: str


class Load:
    """Client of all servers.

    Args:
        max_tokens: of an answer.
        duration_s: of the schedule of random arrivals.
    """

    def __init__(self, max_tokens: int, duration_s: float) -> None:
        self._max_tokens = max_tokens
        self._duration_s = duration_s
        self._prompts = tuple(text for kind in real_text.KINDS for text in real_text.prompts(kind))
        self.rate: float | None = None

    def pile(self, server: Server, count: int = PILE) -> tuple[float, float, int]:
        """Ask many at once; returns tokens and requests a second, and how many failed."""
        result = self._run(server, "at once", count, 1.0, seed=0)
        answered = [each for each in result.records if each.error is None]
        if not answered:
            raise RuntimeError(f"{server.model} answered nothing: {result.records[0].error}")
        seconds = max(each.last_s or 0.0 for each in answered)
        tokens = sum(each.tokens for each in answered)
        return tokens / seconds, len(answered) / seconds, len(result.records) - len(answered)

    def turn(self, server: Server, number: int) -> Reading:
        """One turn: a pile, then random arrivals at the rate of all servers."""
        tokens_per_s, requests_per_s, failed = self.pile(server)
        if self.rate is None:
            raise RuntimeError("the rate of arrivals is set by the first pile")
        result = self._run(server, "poisson", self.rate, self._duration_s, seed=number)
        answered = [each for each in result.records if each.error is None]
        last = max(each.last_s or 0.0 for each in answered)
        return Reading(
            tokens_per_s,
            requests_per_s,
            sum(each.tokens for each in answered) / last,
            percentiles((each.ttft_s for each in answered), (50, LATE)),
            percentiles((each.tpot_s for each in answered), (50, LATE)),
            failed + len(result.records) - len(answered),
        )

    def _run(self, server: Server, schedule: str, rate: float, duration_s: float, seed: int) -> LoadResult:
        plan = Plan(
            client="http",
            address=server.address,
            schedule=schedule,
            rate=rate,
            duration_s=duration_s,
            seed=seed,
            prompts=self._prompts,
            model=server.model,
            max_tokens=self._max_tokens,
        )
        command = [sys.executable, "-m", "experiments.load.generator"]
        done = subprocess.run(command, input=json.dumps(asdict(plan)), stdout=subprocess.PIPE, text=True, check=True)
        return LoadResult.from_dict(json.loads(done.stdout))


def ours(weights: str) -> TurnoutConfig:
    """The real model alone, in bfloat16 or as integers."""
    config = real_model.alone()
    [name] = config.models
    model = config.models[name].model_copy(update={"weights": weights})
    return on_free_ports(config.model_copy(update={"models": {name: model}}))


@contextmanager
def servers(options: argparse.Namespace) -> Iterator[dict[str, Server]]:
    """Start all servers whose environments are there; they end with the context."""
    pythons = {VLLM: options.vllm_python, LLAMA: options.peers_python}
    files = {VLLM: real_model.model_folder(), LLAMA: real_model.gguf_file()}
    found: dict[str, Server] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turnout-servers-")))
        started = []
        for name, python in pythons.items():
            if not python.exists():
                note(f"{TITLES[name]} is left out: there is no {python}")
                continue
            size = Size(THREADS, SLOTS, options.vllm_dtype, compiled=True)
            peer = Neighbour(name, python.absolute(), files[name], folder / f"{name}.log", size)
            stack.callback(peer.kill)
            peer.start()
            started.append(peer)
        for title, weights in ((OURS, "dense"), (OURS_INT4, "int4")):
            config = ours(weights)
            stack.enter_context(running_server(config))
            found[title] = Server(f"127.0.0.1:{config.server.http_port}", next(iter(config.pools)))
        for peer in started:
            peer.wait()
            found[TITLES[peer.name]] = Server(peer.address.removeprefix("http://"), MODEL)
        yield found


async def measure(options: argparse.Namespace) -> Report:
    """All servers, in turns."""
    load = Load(options.max_tokens, options.duration)
    with servers(options) as found:
        report = Report(
            "The real model through servers",
            f"`python -m benchmarks.bench_servers`; {real_model.TITLE} over HTTP (`/v1/chat/completions`, streamed),"
            f" bfloat16 where a row names nothing else, vLLM in {options.vllm_dtype}, {THREADS} threads for each, at"
            f" most {SLOTS} requests at once and {MAX_LENGTH} tokens each at the others, settings as they come. All run"
            f" at the same time, and one is asked at a time. {len(real_text.KINDS) * 12} prompts of four kinds, greedy,"
            f" answers to their end or {options.max_tokens} tokens.",
        )
        for title, server in found.items():
            note(f"{title}: warming up")
            load.pile(server, WARM_UP)
        base = found.get(TITLES[VLLM]) or found[OURS]
        load.rate = SHARE * load.pile(base)[1]
        sides = [Side(title, partial(_turn, load, server)) for title, server in found.items()]
        turns = await take_turns(sides, options.rounds)
    write(report, turns, load.rate, options)
    return report


async def _turn(load: Load, server: Server, number: int) -> Reading:
    note(f"{server.model} at {server.address}")
    return load.turn(server, number)


def write(report: Report, turns: Turns[Reading], rate: float, options: argparse.Namespace) -> None:
    """Two tables: a pile of requests, and random arrivals."""
    report.section("Many at once")
    report.text(f"{PILE} requests at once; tokens per second, medians of {options.rounds} rounds [smallest, largest].")
    report.table(None, list(turns.readings), _columns(turns, {"tokens/s": lambda each: each.tokens_per_s}))
    report.section("Arrivals at random times")
    report.text(
        f"{rate:.2f} requests a second at each server, {SHARE:g} of what vLLM answers of a pile, for"
        f" {options.duration:g} s; arrivals do not wait for answers, and times count from the scheduled moment."
        " Milliseconds, medians over rounds of the median and of the 95th percentile."
    )
    times = {
        "tokens/s": lambda each: each.open_tokens_per_s,
        "first token, p50": lambda each: 1e3 * each.ttft_s[50],
        "first token, p95": lambda each: 1e3 * each.ttft_s[LATE],
        "further token, p50": lambda each: 1e3 * each.tpot_s[50],
    }
    report.table(None, list(turns.readings), _columns(turns, times, compared="first token, p95"))
    failed = {title: sum(each.failed for each in readings) for title, readings in turns.readings.items()}
    if any(failed.values()):
        report.failures += [f"{title}: {count} requests failed" for title, count in failed.items() if count]
    if TITLES[VLLM] in turns.readings:
        ratio = turns.ratio(OURS, TITLES[VLLM], lambda each: each.tokens_per_s)
        late = turns.ratio(OURS, TITLES[VLLM], lambda each: each.ttft_s[LATE])
        report.text(
            f"Over vLLM: {shown(ratio, 2)} of its tokens/s of a pile (goal {RATE_GOAL}: {RATE_GOAL.met(ratio)}), and"
            f" {shown(late, 2)} of its 95th percentile of the first token at equal load (goal: below 1:"
            f" {Goal(1.0, at_most=True).met(late)})."
        )
    report.values["readings"] = {title: [asdict(each) for each in found] for title, found in turns.readings.items()}


def _columns(turns: Turns[Reading], figures: Mapping[str, Any], compared: str = "tokens/s") -> dict[str, Any]:
    """Columns of a table whose rows are servers; the last one compares Turnout with each."""
    columns: dict[str, Any] = {"server": lambda title: title}
    for name, figure in figures.items():
        columns[name] = partial(lambda figure, title: shown(turns.spread(title, figure), 0), figure)
    figure = figures[compared]
    columns[f"{OURS} over it, {compared}"] = lambda title: (
        None if title == OURS else shown(turns.ratio(OURS, title, figure), 2)
    )
    return columns


def parser() -> argparse.ArgumentParser:
    """Make the options."""
    made = command_line(__doc__, RESULT, rounds=3, duration=10.0)
    made.add_argument("--duration", type=float, default=30.0, help="seconds of random arrivals; 10 with --quick")
    made.add_argument("--max-tokens", type=int, default=64)
    faster = "bfloat16" if multiplies_bfloat16() else "float32"  # docs/results/real.md has both
    made.add_argument("--vllm-dtype", choices=("bfloat16", "float32"), default=faster, help="absent: the faster one")
    made.add_argument("--peers-python", type=Path, default=PEERS_PYTHON)
    made.add_argument("--vllm-python", type=Path, default=VLLM_PYTHON)
    return made


if __name__ == "__main__":
    run(parser(), measure)
