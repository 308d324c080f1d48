"""Traces of prompts with shared beginnings, one of them hot, against replicas chosen in two ways."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.harness import note
from benchmarks.scaling.asking import Asked, Watch, ask
from benchmarks.served import running_server
from experiments.load.schedule import poisson
from experiments.process_cpu import cpu_seconds
from turnout.client import AsyncClient
from turnout.config import TurnoutConfig, parse_config
from turnout.free_ports import on_free_ports

CHOICES = ("prefix", "load")
PREFIXES = 36
QUESTION_WORDS = 6
HOT = 0.3  # share of the requests that have the hot beginning
MAX_TOKENS = 8
BYTES_PER_TOKEN = {"demo-small": 512, "demo-large": 4096}
PILE = 24
START_S = 60.0
LOAD = 0.6  # of the rate at which nothing cached is answered
WORDS = ("house", "street", "river", "stone", "bread", "winter", "letter", "garden", "mirror", "copper", "thirty")


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of shared beginnings.

    Attributes:
        words: of one beginning.
        evenness: 0: the n-th of those that are not hot is asked for as 1/n; 1: all of them alike.
        cache_tokens: KV of each replica: for less than half of the beginnings; all replicas together hold them all.
    """

    words: int
    evenness: float
    cache_tokens: int


KINDS = {"short, some often": Kind(110, 0.0, 5120), "long, all alike": Kind(250, 1.0, 11520)}


@dataclass(frozen=True, slots=True)
class Arm:
    """One run of a trace.

    Attributes:
        kind: of `KINDS`.
        choice: how replicas were chosen.
        hits: share of all prompt tokens that were cached.
        ttft_s: p50 and p95.
        busiest: largest share of the replicas' CPU time that one of them used.
        failed: codes of requests that were not answered.
    """

    kind: str
    choice: str
    answered: int
    hits: float
    ttft_s: tuple[float, float]
    busiest: float
    failed: tuple[str, ...]


def config(kind: Kind, choice: str, replicas: int) -> TurnoutConfig:
    """The demo pool with little cache."""
    values = TurnoutConfig.demo().model_dump(mode="json")
    pool: dict[str, Any] = next(iter(values["pools"].values()))
    pool |= {"replicas": replicas, "choice": choice}
    for name, settings in values["models"].items():
        settings |= {"kv_memory_bytes": max(kind.cache_tokens * BYTES_PER_TOKEN[name], 1 << 20), "max_length": 1024}
    values["engine"]["threads"] = 1
    return on_free_ports(parse_config(values))


def prompts(kind: Kind, count: int, seed: int) -> list[str]:
    """Each one of the beginnings and a question of its own; the first beginning is hot."""
    source = random.Random(seed)
    beginnings = [" ".join(source.choices(WORDS, k=kind.words)) for _ in range(PREFIXES)]
    weights = [n ** (kind.evenness - 1) for n in range(1, PREFIXES)]
    made = []
    for number in range(count):
        place = 0 if source.random() < HOT else 1 + source.choices(range(PREFIXES - 1), weights)[0]
        made.append(f"{beginnings[place]} {number} {' '.join(source.choices(WORDS, k=QUESTION_WORDS))}")
    return made


async def capacity(kind: Kind, address: str, pool: str) -> float:
    """Requests a second when many come at once, none of which has anything cached."""
    source = random.Random(99)
    texts = [" ".join(source.choices(WORDS, k=kind.words)) for _ in range(2 * PILE)]
    async with AsyncClient(address) as client:
        for part in (texts[:PILE], texts[PILE:]):  # the first ones warm up
            start = time.monotonic()
            await asyncio.gather(*(_ask(client, text, 0.0, start, pool) for text in part))
            seconds = time.monotonic() - start
    return PILE / seconds


async def _ask(client: AsyncClient, text: str, due_s: float, start: float, pool: str) -> Asked:
    def now() -> float:
        return time.monotonic() - start

    return await ask(client, text, due_s, now, MAX_TOKENS, model=pool, method="plain", params={"model": "large"})


async def trace(kind: str, given: TurnoutConfig, rate: float, count: int, seed: int) -> Arm:
    """Send the requests at their times, and look at who did the work."""
    name, pool = next(iter(given.pools.items()))
    watch = Watch(f"http://127.0.0.1:{given.server.http_port}", name)
    await watch.until(pool.replicas, 0.0, START_S)
    pids = sorted(watch.seen[-1].calls)
    await watch.close()
    due = poisson(rate, 2 * count / rate, seed)[:count]
    before = [cpu_seconds([pid]) for pid in pids]
    async with AsyncClient(f"127.0.0.1:{given.server.grpc_port}") as client:
        start = time.monotonic()
        tasks = []
        for due_s, text in zip(due, prompts(KINDS[kind], count, seed), strict=False):
            await asyncio.sleep(max(due_s - (time.monotonic() - start), 0.0))
            tasks.append(asyncio.create_task(_ask(client, text, due_s, start, name)))
        asked = await asyncio.gather(*tasks)
    used = [cpu_seconds([pid]) - was for pid, was in zip(pids, before, strict=True)]
    done = [each for each in asked if each.error is None]
    times = [each.ttft_s for each in done] or [float("nan")]
    return Arm(
        kind=kind,
        choice=pool.choice,
        answered=len(done),
        hits=sum(each.cached_tokens for each in done) / max(sum(each.prompt_tokens for each in done), 1),
        ttft_s=(float(np.percentile(times, 50)), float(np.percentile(times, 95))),
        busiest=max(used) / max(sum(used), 1e-9),
        failed=tuple(each.error for each in asked if each.error is not None),
    )


def run(rounds: int, count: int, replicas: int) -> tuple[dict[str, float], list[Arm]]:
    """(rate of each trace, requests a second; every round of both arms, taking turns, each on a new server)."""
    rates: dict[str, float] = {}
    arms = []
    for number in range(rounds):
        for kind, how in KINDS.items():
            for choice in CHOICES if number % 2 == 0 else CHOICES[::-1]:
                note(f"round {number + 1}: beginnings {kind}, replicas chosen by {choice}")
                given = config(how, choice, replicas)
                with running_server(given):
                    # Every server is warmed up in the same way; the first one says how fast the trace may come.
                    address, pool = f"127.0.0.1:{given.server.grpc_port}", next(iter(given.pools))
                    found = asyncio.run(capacity(how, address, pool))
                    rates.setdefault(kind, LOAD * found)
                    arms.append(asyncio.run(trace(kind, given, rates[kind], count, seed=number)))
    return rates, arms
