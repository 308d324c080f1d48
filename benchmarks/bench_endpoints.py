"""Added latency of a passed-on stream: a scripted endpoint asked through Turnout, and asked directly.

The endpoint computes nothing. Both ways are asked in turns, over HTTP with the same client: one request after the
other for the time to the first token, then several streams at once for tokens per second.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.harness import Report, Side, Turns, command_line, run, shown, take_turns
from benchmarks.served import running_server
from experiments.stats.intervals import spread
from turnout.config import parse_config
from turnout.free_ports import free_port, on_free_ports

RESULT = Path("docs/results/endpoints.md")
DIRECT, THROUGH = "direct", "through Turnout"
# By `server.ingress_processes`.
WAYS = {0: "behind Serve's proxy", 1: "listening itself"}
FIRST_GOAL_MS, RATE_GOAL = 3.0, 0.95
TOKENS, PACE_S = 100, 0.01
SHORT = 2  # tokens of an answer that is asked for its first one


@dataclass(frozen=True, slots=True)
class Size:
    """Size of the measurement.

    Attributes:
        rounds: counted ones; one more warms up.
        requests: one after the other, in each turn.
        streams: at once.
    """

    rounds: int
    requests: int
    streams: int


@dataclass(frozen=True, slots=True)
class Reading:
    """What one turn found: median time to the first token, in seconds, and tokens per second of all streams."""

    first_s: float
    rate: float


@contextmanager
def scripted_endpoint() -> Iterator[int]:
    """The scripted endpoint in a process of its own; yields its port."""
    port = free_port()
    arguments = [str(port), str(TOKENS), str(PACE_S)]
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.scripted_endpoint", *arguments])
    try:
        while process.poll() is None and _is_silent(port):
            time.sleep(0.05)
        if process.poll() is not None:
            raise RuntimeError(f"the scripted endpoint ended with status {process.returncode}")
        yield port
    finally:
        process.terminate()
        process.wait(timeout=10)


def _is_silent(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


async def _stream(session: aiohttp.ClientSession, url: str, most: int) -> tuple[float, int]:
    """Seconds to the first token of a stream, and its tokens."""
    body = {"model": "pool", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": most}
    began, first_s, tokens = time.perf_counter(), 0.0, 0
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            choices = json.loads(line[6:])["choices"]
            text = choices[0]["delta"].get("content") if choices else None
            if text:
                first_s = first_s or time.perf_counter() - began
                tokens += text.count(" ")
    return first_s, tokens


async def _turn(url: str, size: Size, number: int) -> Reading:
    async with aiohttp.ClientSession() as session:
        # Read to their ends: who hangs up has the next request wait for what is cancelled.
        firsts = [(await _stream(session, url, SHORT))[0] for _ in range(size.requests)]
        began = time.perf_counter()
        streams = await asyncio.gather(*(_stream(session, url, TOKENS) for _ in range(size.streams)))
        seconds = time.perf_counter() - began
    counts = [tokens for _, tokens in streams]
    if counts != [TOKENS] * size.streams:
        raise RuntimeError(f"streams of {TOKENS} tokens came with {counts}")
    return Reading(statistics.median(firsts), sum(counts) / seconds)


async def measure(arguments: Any) -> Report:
    """Measure both ways in turns, with the ingress behind Serve's proxy and with one that listens itself."""
    size = Size(arguments.rounds, arguments.requests, 8)
    found = {}
    with scripted_endpoint() as port:
        for processes, way in WAYS.items():
            endpoint = {"url": f"http://127.0.0.1:{port}/v1", "model": "m"}
            values = {
                "models": {"far": {"endpoint": endpoint}},
                "pools": {"pool": {"large": "far"}},
                "server": {"ingress_processes": processes},
            }
            config = on_free_ports(parse_config(values))
            with running_server(config):
                urls = {DIRECT: f"http://127.0.0.1:{port}", THROUGH: f"http://127.0.0.1:{config.server.http_port}"}
                sides = [Side(name, partial(_turn, url, size)) for name, url in urls.items()]
                found[way] = await take_turns(sides, size.rounds)
    return page(found, size)


def page(found: Mapping[str, Turns[Reading]], size: Size) -> Report:
    """The table, with how it was obtained."""
    report = Report(
        "Endpoints: a stream that is passed on",
        f"`make bench-endpoints`; a scripted endpoint that computes nothing sends {TOKENS} tokens, the first at once"
        f" and then one every {1000 * PACE_S:g} ms. It is asked directly and through a served pool, in turns:"
        f" {size.rounds} rounds of {size.requests} requests for {SHORT} tokens one after the other, and {size.streams}"
        " streams at once."
        " Medians and extremes over rounds. The ingress is behind Serve's proxy, as by default, or listens itself"
        " (`server.ingress_processes: 1`).",
    )
    report.values |= {"size": asdict(size), "readings": {way: _plain(turns) for way, turns in found.items()}}
    rows = [row for way, turns in found.items() for row in _rows(way, turns, size)]
    names = ("ingress", "figure", "value", "goal")
    report.table("endpoints", rows, {name: partial(_cell, place) for place, name in enumerate(names)})
    return report


def _plain(turns: Turns[Reading]) -> dict[str, Any]:
    return {name: [asdict(each) for each in readings] for name, readings in turns.readings.items()}


def _rows(way: str, turns: Turns[Reading], size: Size) -> list[tuple[str, ...]]:
    added = spread(turns.compared(THROUGH, DIRECT, lambda mine, other: 1000 * (mine.first_s - other.first_s)))
    rate = turns.ratio(THROUGH, DIRECT, lambda reading: reading.rate)
    first = {name: turns.spread(name, lambda reading: 1000 * reading.first_s) for name in turns.readings}
    return [
        (way, "added to the first token (median), ms", shown(added, 1), f"below {FIRST_GOAL_MS:g}"),
        (way, f"tokens/s of {size.streams} streams, over direct", shown(rate, 3), f"above {RATE_GOAL:g}"),
        *((way, f"first token, {name}, ms", shown(each, 1), "") for name, each in first.items()),
    ]


def _cell(place: int, row: tuple[str, ...]) -> str:
    return row[place]


if __name__ == "__main__":
    options = command_line(__doc__, RESULT, rounds=5, requests=20)
    options.add_argument("--requests", type=int, default=60, help="one after the other, in each turn")
    run(options, measure)
