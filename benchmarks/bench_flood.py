"""What other tenants feel of one that floods the server: their time to first token, beside a flood and without.

The served demo pair over HTTP with API keys. Two tenants ask now and then; a third one floods, once beyond its limit of
requests at once, and once with no limit, so that nothing holds it but the equal shares of the engine. Every round has
all three in changing order, with the same arrivals. Tokens are counted where they arrive, beside the usage records.
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
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import uvloop

from benchmarks.flooding import Flood, Flooded, flooding
from benchmarks.harness import note, publish
from benchmarks.served import on_free_ports, running_server
from experiments.load.clients import HttpClient
from experiments.load.generator import drive
from experiments.load.records import Plan, Used
from experiments.load.schedule import poisson
from experiments.machine import describe, one_line
from experiments.statistics import Interval
from experiments.stats.intervals import resampled
from training.data.arithmetic import MIDDLE_DIFFICULTY, heldout
from turnout.access_config import AccessConfig, UsageConfig
from turnout.config import TurnoutConfig

RESULT = Path("docs/results/flood.md")
GOAL = 2.0  # times the others' 95th percentile without a flood
LEAST_ROUNDS = 8  # the interval of fewer says nothing
CONCURRENCY = 4  # of the tenant that has a limit
OTHERS = ("steady", "modest")
ALONE = "no flood"
# Beside what the others are measured, and the tenant that floods.
FLOODS = {f"a flood beyond its limit of {CONCURRENCY} at once": "limited", "a flood without a limit": "unlimited"}
LIMITS = {"limited": [f"concurrency={CONCURRENCY}"]}
RECORDED_S = 30.0  # until what is recorded behind the answers must be there

Times = list[float | None]  # seconds to first token; None: there was no answer


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured.

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
        rounds: the others' times, by what they were measured beside.
        floods: what came of the floods, by the tenant; the round that warms up is in it.
        used: by tenant, as the answers say; likewise.
        recorded: by tenant, as the usage records say.
    """

    rounds: list[dict[str, Times]] = field(default_factory=list)
    floods: dict[str, list[Flooded]] = field(default_factory=dict)
    used: dict[str, Used] = field(default_factory=dict)
    recorded: dict[str, Used] = field(default_factory=dict)


async def measure(url: str, keys: dict[str, str], size: Size) -> Found:
    """All rounds; the first one warms up, and its times are thrown away."""
    found = Found(floods={tenant: [] for tenant in FLOODS.values()})
    parts = [ALONE, *FLOODS]
    prompts = tuple(problem.prompt for problem in heldout(MIDDLE_DIFFICULTY, 64))
    plan = Plan("http", urlsplit(url).netloc, "poisson", size.rate, size.seconds, 0, prompts, "demo", size.tokens)
    others = [HttpClient(plan, keys[name]) for name in OTHERS]
    try:
        for number in range(size.rounds + 1):
            times: dict[str, Times] = {}
            # Each part is first, second and third equally often, so that a machine that tires favours none.
            for place in range(len(parts)):
                part = parts[(number + place) % len(parts)]
                tenant = FLOODS.get(part)
                with nullcontext() if tenant is None else flooding(_flood(url, keys[tenant], size)) as flooded:
                    times[part] = await _ask(others, plan, number)
                if tenant is not None and flooded is not None:
                    found.floods[tenant].append(flooded)
            shown = ", ".join(f"{1000 * percentile(times[part], 95):.0f}" for part in parts)
            note(f"round {number} of {size.rounds}: p95 {shown} ms")
            if number:
                found.rounds.append(times)
    finally:
        await asyncio.gather(*(client.close() for client in others))
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


def _flood(url: str, key: str, size: Size) -> Flood:
    body = {
        "model": "demo",
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
        beside, alone = (percentile(_all(rounds, name, picked.tolist()), share) for name in (part, ALONE))
        return beside / alone if alone else math.nan

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


def page(found: Found, size: Size, machine: dict[str, str]) -> str:
    """The tables, with how they were obtained."""
    return "\n".join(
        [
            "# A flood from one tenant",
            "",
            f"`make bench-flood`; demo pair over HTTP with API keys. {len(OTHERS)} tenants ask {size.rate:g} times a"
            f" second each, at random, for at most {size.tokens} tokens; beside them a third one has {size.streams}"
            f" streams of {size.flood_tokens} tokens each, which ask again as soon as they are answered or refused."
            f" {len(found.rounds)} rounds of {size.seconds:g} s for each row, in changing order, with the same"
            " arrivals."
            " Times count from when a request should have left; one without an answer counts as endless."
            " Times that without a flood: percentiles of all rounds together [95% interval over rounds]."
            f" Goal: the 95th percentile at most {GOAL:g} times as long. It is met where the whole interval says so,"
            " missed where none of it does, and open otherwise. The flood's clients give way to all else (`nice`), but"
            " share the cores.",
            "",
            f"Machine: {one_line(machine)}.",
            "",
            *_first_tokens(found.rounds),
            "",
            *_floods(found.floods),
            "",
            *_usage(found),
            "",
        ]
    )


def _first_tokens(rounds: list[dict[str, Times]]) -> list[str]:
    lines = [
        "| the others, beside | requests | no answer | p50, ms | p95, ms | p50, times | p95, times | goal met |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for part in (ALONE, *FLOODS):
        times = _all(rounds, part, list(range(len(rounds))))
        shown = " | ".join(f"{1000 * percentile(times, share):.0f}" for share in (50, 95))
        line = f"| {part} | {len(times)} | {times.count(None)} | {shown} |"
        if part == ALONE:
            lines.append(f"{line} | | |")
            continue
        p50, p95 = ratio(rounds, part, 50), ratio(rounds, part, 95)
        lines.append(f"{line} {_times(p50)} | {_times(p95)} | {verdict(p95, len(rounds))} |")
    return lines


def _times(value: Interval) -> str:
    return f"{value.value:.2f} [{value.low:.2f}, {value.high:.2f}]"


def _floods(floods: dict[str, list[Flooded]]) -> list[str]:
    lines = [
        "| the flood, all rounds | answered | refused (429) | of these without a time to try again | failed |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, tenant in FLOODS.items():
        runs = floods[tenant]
        answered = sum(each.used.requests for each in runs)
        refused, unnamed, failed = (
            sum(getattr(each, what) for each in runs) for what in ("refused", "unnamed", "failed")
        )
        lines.append(f"| {name} | {answered} | {refused} | {unnamed} | {failed} |")
    return lines


def _usage(found: Found) -> list[str]:
    lines = [
        "| tenant | answers | prompt tokens | tokens | the usage records say |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for tenant, used in found.used.items():
        recorded = found.recorded.get(tenant, Used())
        said = "the same" if recorded == used else f"{_counts(recorded)}: **not the same**"
        lines.append(f"| {tenant} | {_counts(used).replace(', ', ' | ')} | {said} |")
    return lines


def _counts(used: Used) -> str:
    return f"{used.requests}, {used.prompt_tokens}, {used.completion_tokens}"


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


def main(size: Size, out: Path | None) -> None:
    """Measure, print, and save where there is a place for it."""
    machine = describe()
    with tempfile.TemporaryDirectory(prefix="turnout-flood-") as temporary:
        folder = Path(temporary)
        keys, usage = add_tenants(folder / "tenants.yaml"), folder / "usage"
        access = AccessConfig(tenants_file=str(folder / "tenants.yaml"), usage=UsageConfig(folder=str(usage)))
        config = on_free_ports(TurnoutConfig.demo().model_copy(update={"access": access}))
        url = f"http://127.0.0.1:{config.server.http_port}"
        with running_server(config, api_key=keys[OTHERS[0]]):
            found = uvloop.run(measure(url, keys, size))
            found.recorded = recorded(usage, found.used)
    values = {"machine": machine, "size": asdict(size), **asdict(found)}
    publish(page(found, size, machine), out, values)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round, results printed and not saved")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each of the three parts of a round")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second of each of the others")
    parser.add_argument("--streams", type=int, default=16, help="of the flood")
    parser.add_argument("--out", type=Path, help=f"absent: {RESULT}, nowhere with --quick")
    chosen = parser.parse_args()
    rounds, seconds = (1, 4.0) if chosen.quick else (chosen.rounds, chosen.seconds)
    main(
        Size(rounds, seconds, chosen.rate, tokens=8, streams=chosen.streams, flood_tokens=100),
        chosen.out or (None if chosen.quick else RESULT),
    )
