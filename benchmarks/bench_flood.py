"""Effect of a tenant that floods the server on others: their time to first token, during a flood and without.

The served demo pair over HTTP with API keys. Two tenants ask now and then; a third one floods, once beyond its limit of
requests at once, and once with no limit, so that nothing holds it but the equal shares of the engine. Every round has
all three in changing order, with the same arrivals. Tokens are counted where they arrive, and in the usage records.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from benchmarks.harness import Cell, Report, Side, command_line, note, run, shown, take_turns
from benchmarks.noisy_neighbour import Flood, Flooded, flooding
from benchmarks.served import running_server
from experiments.load.clients import HttpClient
from experiments.load.generator import drive
from experiments.load.records import Plan, Used
from experiments.load.schedule import poisson
from experiments.pairs import DEMO, open_pair
from experiments.stats.intervals import Interval, resampled
from training.data.arithmetic import MIDDLE_DIFFICULTY, heldout
from turnout.access_config import AccessConfig, UsageConfig
from turnout.free_ports import on_free_ports

GOAL = 2.0  # times the others' 95th percentile without a flood
LEAST_ROUNDS = 8  # the interval of fewer says nothing
CONCURRENCY = 4  # of the tenant that has a limit
OTHERS = ("steady", "modest")
ALONE = "no flood"
# The loads under which the others are measured, and the tenant that floods.
FLOODS = {f"a flood beyond its limit of {CONCURRENCY} at once": "limited", "a flood without a limit": "unlimited"}
LIMITS = {"limited": [f"concurrency={CONCURRENCY}"]}
RECORDED_S = 30.0  # until what is recorded behind the answers must be there

Times = list[float | None]  # seconds to first token; None: there was no answer


@dataclass(frozen=True, slots=True)
class Size:
    """Size of the measurement.

    Attributes:
        rounds: counted ones; one more warms up.
        seconds: of each part of a round.
        rate: requests a second of each of the others, on average.
        tokens: most of an answer to the others.
        streams: of the flood.
        flood_tokens: of each answer to the flood.
    """

    rounds: int
    seconds: float
    rate: float
    tokens: int
    streams: int
    flood_tokens: int


@dataclass(slots=True)
class Found:
    """What was measured.

    Attributes:
        rounds: the others' times, by the load they were measured under.
        floods: what came of the floods, by the tenant; the round that warms up is in it.
        used: by tenant, as the answers say; likewise.
        recorded: by tenant, as the usage records say.
    """

    rounds: list[dict[str, Times]] = field(default_factory=list)
    floods: dict[str, list[Flooded]] = field(default_factory=dict)
    used: dict[str, Used] = field(default_factory=dict)
    recorded: dict[str, Used] = field(default_factory=dict)


async def measure(url: str, keys: dict[str, str], size: Size, model: str = DEMO) -> Found:
    """All rounds, with and without each flood in turn."""
    found = Found(floods={tenant: [] for tenant in FLOODS.values()})
    prompts = tuple(problem.prompt for problem in heldout(MIDDLE_DIFFICULTY, 64))
    plan = Plan("http", urlsplit(url).netloc, "poisson", size.rate, size.seconds, 0, prompts, model, size.tokens)
    others = [HttpClient(plan, keys[name]) for name in OTHERS]

    async def turn(part: str, number: int) -> Times:
        tenant = FLOODS.get(part)
        with nullcontext() if tenant is None else flooding(_flood(url, keys[tenant], size, model)) as flooded:
            times = await _ask(others, plan, number)
        if tenant is not None and flooded is not None:
            found.floods[tenant].append(flooded)
        note(f"round {number} of {size.rounds}, {part}: p95 {1000 * percentile(times, 95):.0f} ms")
        return times

    try:
        turns = await take_turns([Side(part, partial(turn, part)) for part in (ALONE, *FLOODS)], size.rounds)
    finally:
        await asyncio.gather(*(client.close() for client in others))
    found.rounds = [dict(zip(turns.readings, row, strict=True)) for row in zip(*turns.readings.values(), strict=True)]
    found.used = dict(zip(OTHERS, (client.used for client in others), strict=True))
    found.used |= {tenant: _sum([each.used for each in all_of]) for tenant, all_of in found.floods.items()}
    return found


async def _ask(others: list[HttpClient], plan: Plan, seed: int) -> Times:
    """The times of all of the others, who do not wait for their answers before they ask again."""
    arrivals = [poisson(plan.rate, plan.duration_s, seed * len(others) + place) for place in range(len(others))]
    runs = await asyncio.gather(
        *(
            drive(client, times, plan.prompts[place :: len(others)], plan.drain_s)
            for place, (client, times) in enumerate(zip(others, arrivals, strict=True))
        )
    )
    return [record.ttft_s for records in runs for record in records]


def _flood(url: str, key: str, size: Size, model: str) -> Flood:
    body = {
        "model": model,
        "prompt": "def f(x):",
        "max_tokens": size.flood_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return Flood(f"{url}/v1/completions", key, size.streams, body)


def _sum(parts: list[Used]) -> Used:
    return Used(
        sum(each.requests for each in parts),
        sum(each.prompt_tokens for each in parts),
        sum(each.completion_tokens for each in parts),
    )


def percentile(times: Times, share: int) -> float:
    """A time that was observed, by nearest rank; a request without an answer took infinitely long.

    Args:
        times: seconds; without any there is none, NaN.
        share: percent.
    """
    known = [math.inf if each is None else each for each in times]
    return float(np.percentile(known, share, method="inverted_cdf")) if known else math.nan


def ratio(rounds: list[dict[str, Times]], part: str, share: int) -> Interval:
    """A percentile of the others' times in times of that without a flood, with its interval over rounds."""

    def of(picked: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> float:
        during, alone = (percentile(_all(rounds, name, picked.tolist()), share) for name in (part, ALONE))
        return during / alone if alone else math.nan

    return resampled(of, len(rounds))


def _all(rounds: list[dict[str, Times]], part: str, picked: list[int]) -> Times:
    return [each for number in picked for each in rounds[number][part]]


def verdict(times: Interval, rounds: int) -> str:
    """Whether the goal is met, as far as the interval tells."""
    if not math.isfinite(times.value):
        return "no"  # more than one in twenty had no answer
    if rounds < LEAST_ROUNDS or not (math.isfinite(times.low) and math.isfinite(times.high)):
        return "open"
    return "yes" if times.high <= GOAL else "no" if times.low > GOAL else "open"


def page(found: Found, size: Size, title: str = "demo pair") -> Report:
    """The tables, with how they were obtained."""
    report = Report(
        "A flood from one tenant",
        f"`make bench-flood`; {title} over HTTP with API keys. {len(OTHERS)} tenants ask {size.rate:g} times a second"
        f" each, at random, for at most {size.tokens} tokens; a third one has {size.streams} streams of"
        f" {size.flood_tokens} tokens each, which ask again as soon as they are answered or refused."
        f" {len(found.rounds)} rounds of {size.seconds:g} s for each row, in changing order, with the same arrivals."
        " Times count from when a request should have left; one without an answer counts as endless. Times that without"
        " a flood: percentiles of all rounds together [95% interval over rounds]. Goal: the 95th percentile at most"
        f" {GOAL:g} times as long. It is met where the whole interval says so, missed where none of it does, and open"
        " otherwise. The flood's clients run at the lowest priority (`nice`), but share the cores.",
    )
    report.values |= {"size": asdict(size), **asdict(found)}

    def times(part: str) -> Times:
        return _all(found.rounds, part, list(range(len(found.rounds))))

    def slower(part: str, share: int) -> str | None:
        return None if part == ALONE else shown(ratio(found.rounds, part, share), 2)

    firsts: dict[str, Callable[[str], Cell]] = {
        "the others, during": str,
        "requests": lambda part: len(times(part)),
        "no answer": lambda part: times(part).count(None),
        "p50, ms": lambda part: shown(percentile(times(part), 50), 0, 1000),
        "p95, ms": lambda part: shown(percentile(times(part), 95), 0, 1000),
        "p50, times": lambda part: slower(part, 50),
        "p95, times": lambda part: slower(part, 95),
        "goal met": lambda part: None if part == ALONE else verdict(ratio(found.rounds, part, 95), len(found.rounds)),
    }
    report.table(None, [ALONE, *FLOODS], firsts)

    def total(name: str, what: str) -> int:
        return sum(int(getattr(each, what)) for each in found.floods[FLOODS[name]])

    floods: dict[str, Callable[[str], Cell]] = {
        "the flood, all rounds": str,
        "answered": lambda name: sum(each.used.requests for each in found.floods[FLOODS[name]]),
        "refused (429)": lambda name: total(name, "refused"),
        "of these without a time to try again": lambda name: total(name, "unnamed"),
        "failed": lambda name: total(name, "failed"),
    }
    report.table(None, list(FLOODS), floods)

    def recorded(tenant: str) -> str:
        said = found.recorded.get(tenant, Used())
        if said == found.used[tenant]:
            return "the same"
        return f"{said.requests}, {said.prompt_tokens}, {said.completion_tokens}: **not the same**"

    usage: dict[str, Callable[[str], Cell]] = {
        "tenant": str,
        "answers": lambda tenant: found.used[tenant].requests,
        "prompt tokens": lambda tenant: found.used[tenant].prompt_tokens,
        "tokens": lambda tenant: found.used[tenant].completion_tokens,
        "the usage records say": recorded,
    }
    report.table(None, list(found.used), usage)
    return report


def add_tenants(file: Path) -> dict[str, str]:
    """Make a tenants file as an operator would; the key of each tenant."""
    keys = {}
    for name in (*OTHERS, *FLOODS.values()):
        limits = [word for limit in LIMITS.get(name, []) for word in ("--limit", limit)]
        keys[name] = _turnout("tenants", "add", name, "--file", str(file), *limits).strip()
    return keys


def recorded(folder: Path, used: dict[str, Used]) -> dict[str, Used]:
    """What the usage records of a folder add up to, by tenant; records are written behind the answers.

    Args:
        folder: of the records.
        used: what they should say; where they do not in RECORDED_S, what they say then.
    """
    until = time.monotonic() + RECORDED_S
    while True:
        totals = json.loads(_turnout("tenants", "usage", "--folder", str(folder), "--json"))["totals"]
        found = {
            name: Used(each["requests"], each["prompt_tokens"], each["completion_tokens"])
            for name, each in totals.items()
        }
        if found == used or time.monotonic() > until:
            return found
        time.sleep(0.5)


def _turnout(*words: str) -> str:
    command = [sys.executable, "-m", "cli.main", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


async def measure_all(options: argparse.Namespace) -> Report:
    """Serve a pair to tenants, and measure."""
    pair = open_pair(options.pair)
    size = Size(options.rounds, options.seconds, options.rate, tokens=8, streams=options.streams, flood_tokens=100)
    with tempfile.TemporaryDirectory(prefix="turnout-flood-") as temporary:
        folder = Path(temporary)
        keys, usage = add_tenants(folder / "tenants.yaml"), folder / "usage"
        access = AccessConfig(tenants_file=str(folder / "tenants.yaml"), usage=UsageConfig(folder=str(usage)))
        config = on_free_ports(pair.config.model_copy(update={"access": access}))
        url = f"http://127.0.0.1:{config.server.http_port}"
        with running_server(config, api_key=keys[OTHERS[0]]):
            found = await measure(url, keys, size, pair.pool)
            found.recorded = recorded(usage, found.used)
    return page(found, size, pair.title)


if __name__ == "__main__":
    parser = command_line(__doc__, Path("docs/results/flood.md"), rounds=12, takes_pair=True, seconds=4.0)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each of the three parts of a round")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second of each of the others")
    parser.add_argument("--streams", type=int, default=16, help="of the flood")
    run(parser, measure_all)
