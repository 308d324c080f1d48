"""Measures what the simulator is fed, and writes `costs.json`: `python -m benchmarks.scaling.gather`.

Steps come from the engine's own probe of the demo pair; a step's cost without its forward from runs of a pool in this
process, alone and sixteen at once; hops and transfers from `docs/results/hop.json`; CPU time of proxy, ingress and
controller from a server that is started twice; choices from `scripts.choice_cost`. Other runs of the pool are
kept: the simulator is to foretell them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import note, show
from benchmarks.scaling import costs as parts
from benchmarks.scaling.served_costs import measure_served
from engine.cache.paged_kv import PagedKV
from engine.costs.step_time import StepTime
from engine.model import EngineModel
from experiments import machine
from pool.local_pool import LocalPool
from turnout.calls import Chunk, GenerateCall, Usage
from turnout.config import TurnoutConfig
from turnout.cost import SpeculationMeter
from turnout.types import SamplingParams

HOPS = Path("docs/results/hop.json")
PROMPT, ANSWER = 64, 64
DRAFT = 4
FIXED = {"drafter": "model_chain", "length": "fixed"}
# Draft length and requests at once; the first two decide what a step costs in addition to its forward.
FITTED = ((0, 1), (0, 16))
FORETOLD = ((0, 4), (0, 32), (DRAFT, 1), (DRAFT, 4), (DRAFT, 16))
ROUNDS = 3
WARM_UP = 0.3
BYTES_PER_S = 1.25e9  # of a network of 10 Gbit/s


async def answer(pool: LocalPool, number: int, draft: int, wrote: Callable[[int], None]) -> SpeculationMeter:
    """One request of a fixed length with a prompt of its own; `wrote` is called with its tokens as they come."""
    prompt = tuple((7919 * (number + 1) + 31 * place) % pool.vocab_size for place in range(PROMPT))
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True, seed=number)
    name, params = ("speculative", {**FIXED, "draft_length": draft}) if draft else ("plain", {"model": "large"})
    call = GenerateCall(f"gather-{number}", pool.name, sampling, prompt, method=name, params=params)
    meter = SpeculationMeter()
    async for event in pool.generate(call):
        if isinstance(event, Chunk):
            wrote(len(event.tokens))
        elif isinstance(event, Usage):
            meter = event.speculation
        else:
            raise RuntimeError(f"the pool did not answer: {event}")
    return meter


class PoolRuns:
    """Runs of the demo pool in this process."""

    def __init__(self, pool: LocalPool) -> None:
        self._pool = pool
        self._count = 0
        self.speculation = SpeculationMeter()

    async def rate(self, draft: int, concurrency: int, seconds: float) -> float:
        """Tokens a second with a number of requests at once, each followed by another one; the first part warms up."""
        start = time.perf_counter()
        since, until = start + WARM_UP * seconds, start + seconds
        tokens = 0

        def wrote(count: int) -> None:
            nonlocal tokens
            tokens += count * (since <= time.perf_counter() < until)

        async def client() -> None:
            while time.perf_counter() < until:
                self._count += 1
                self.speculation.merge(await answer(self._pool, self._count, draft, wrote))

        await asyncio.gather(*(client() for _ in range(concurrency)))
        return tokens / (until - since)


async def measure_pool(seconds: float) -> tuple[parts.Pair, parts.Way, list[parts.Observed]]:
    """The pair's costs, what its drafts are worth, and what was observed."""
    config = TurnoutConfig.demo()
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"threads": 1})})
    pool = LocalPool.load("demo", config)
    settings = config.pools["demo"]
    small, large = pool.engines[settings.small], pool.engines[settings.large]
    runs = PoolRuns(pool)
    observed = []
    try:
        await runs.rate(DRAFT, 4, seconds / 4)
        runs.speculation = SpeculationMeter()
        shapes = (*FITTED, *FORETOLD)
        rates = dict.fromkeys(shapes, 0.0)
        forwards: dict[tuple[int, int], parts.Forward] = {}
        for number in range(ROUNDS):
            for draft, concurrency in shapes:
                note(f"one pool, round {number + 1}, drafts of {draft}, {concurrency} at once")
                rate = await runs.rate(draft, concurrency, seconds)
                # What else the machine does only takes time away; forwards are to be those of the same run.
                if rate > rates[draft, concurrency]:
                    rates[draft, concurrency], forwards[draft, concurrency] = rate, _forward(large)
        for (draft, concurrency), rate in rates.items():
            fitted = (draft, concurrency) in FITTED
            observed.append(
                parts.Observed(
                    draft=draft,
                    concurrency=concurrency,
                    prompt=PROMPT,
                    answer=ANSWER,
                    tokens_per_s=rate,
                    fitted=fitted,
                )
            )
        step_s, row_s = _overhead([forwards[shape].times() for shape in FITTED], observed)
        pair = parts.Pair(
            small=_forward(small),
            large=forwards[FITTED[-1]],
            step_s=step_s,
            row_s=row_s,
            kv_bytes=sum(_token_bytes(engine) for engine in (small, large)),
            cache_tokens=min(_cache_tokens(engine) for engine in (small, large)),
            max_batch=config.engine.max_batch,
            token_budget=config.engine.token_budget,
            max_slowdown=config.engine.max_slowdown,
        )
    finally:
        await pool.close()
    accepted = acceptance(runs.speculation.tokens_per_round, DRAFT)
    return pair, parts.Way(draft=DRAFT, acceptance=accepted, draft_bytes=4.0 * large.vocab_size), observed


def _overhead(forwards: list[StepTime], observed: list[parts.Observed]) -> tuple[float, float]:
    """Seconds of a step, and of a row of it, in addition to the forward: from the time of a step with 1 and 16 rows."""
    spent = []
    for times, each in zip(forwards, observed, strict=False):
        rows = each.concurrency
        context = PROMPT + ANSWER // 2
        # Reading the prompt is a step of its own in every ANSWER.
        prompt = times.seconds(PROMPT, PROMPT * (PROMPT + 1) // 2, 1) / ANSWER * rows
        forward = times.seconds(rows, rows * context, rows) + prompt
        spent.append((rows, max(rows / each.tokens_per_s - forward, 0.0)))
    (few, short), (many, long) = spent
    row_s = max((long - short) / (many - few), 0.0)
    return max(short - few * row_s, 0.0), row_s


def _forward(engine: EngineModel) -> parts.Forward:
    """As the engine predicts it now."""
    cost, times = engine.step_time.cost, engine.step_time
    factor = times.seconds(8, 8 * 96, 8) / StepTime(cost).seconds(8, 8 * 96, 8)
    values: dict[str, Any] = {
        name: getattr(cost, name) * factor for name in ("base", "per_attended", "per_read", "per_sequence")
    }
    slopes = tuple(slope * factor for slope in cost.slopes)
    return parts.Forward(**values, knots=cost.knots, slopes=slopes, read_cap=cost.read_cap)


def _token_bytes(engine: EngineModel) -> int:
    store = engine.store
    return PagedKV.slot_bytes(engine.num_layers, store.kv_heads, store.head_dim, engine.dtype)


def _cache_tokens(engine: EngineModel) -> int:
    return int(engine.pool.num_blocks * engine.pool.block_size)


def acceptance(tokens_per_round: float, draft: int) -> float:
    """The probability of each drafted token with which a round brings that number of tokens, its own included."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**n for n in range(draft + 1)) < tokens_per_round else (low, middle)
    return (low + high) / 2


def hops(path: Path) -> tuple[parts.Hop, parts.Link]:
    """From the results of `make bench-hop`."""
    found = json.loads(path.read_text())
    operation = next(each for each in found["operations"] if each["name"] == "decode 1 token")
    hop = parts.Hop(
        transit_s=operation["transit_s"] + operation["actor_s"],
        coordinator_s=operation["coordinator_s"] + operation["client_s"],
    )
    sizes = np.array([each["nbytes"] for each in found["transfers"]], dtype=float)
    seconds = np.array([each["transport_s"]["value"] for each in found["transfers"]])
    slope, latency = np.polyfit(sizes, seconds, 1, w=1 / seconds)
    return hop, parts.Link(latency_s=max(float(latency), 0.0), bytes_per_s=float(1 / slope))


def _sources(facts: dict[str, str]) -> dict[str, str]:
    where = machine.one_line(facts)
    return {
        "pair, way, observed": f"demo pair, one thread, in one process; {where}",
        "hop, transfer": f"{HOPS}, which names its machine",
        "proxy, ingress, control.idle, control.per_replica": f"CPU time of processes of a served demo pool; {where}",
        "replica": "assumed to be the ingress's: its own work for Serve cannot be separated from its model's",
        "choice, control.stats_bytes, control.byte_s": f"scripts.choice_cost, made-up replicas; {where}",
        "store": "assumed: 10 Gbit/s and 0.2 ms a server; see docs/results/redis_access.md for one machine",
        "prices": "assumed",
    }


def main(out: Path, seconds: float, choices: Iterable[str]) -> None:
    """Measure and write."""
    facts = machine.describe()
    hop, transfer = hops(HOPS)
    pair, way, observed = asyncio.run(measure_pool(seconds))
    chosen = json.loads(subprocess.run(list(choices), stdout=subprocess.PIPE, text=True, check=True).stdout)
    served = measure_served(TurnoutConfig.demo())
    found = parts.Costs(
        pair=pair,
        way=way,
        hop=hop,
        transfer=transfer,
        proxy=served.proxy,
        ingress=served.ingress,
        replica=served.ingress,
        control=parts.Control(
            idle=served.control_idle,
            per_replica=served.control_per_replica,
            stats_bytes=chosen["stats_bytes"],
            stats_period_s=1.0,
            byte_s=chosen["byte_s"],
        ),
        choice=parts.Choice(**{name: chosen[name] for name in ("base_s", "per_replica_s", "hear_s")}),
        store=parts.Link(latency_s=2e-4, bytes_per_s=BYTES_PER_S),
        observed=tuple(observed),
        sources=_sources(facts),
    )
    out.write_text(found.model_dump_json(indent=1) + "\n")
    show(f"written: {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=parts.DEFAULT)
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="length of each run of the pool, of which there are 21"
    )
    given = parser.parse_args()
    main(given.out, given.seconds, [sys.executable, "-m", "scripts.choice_cost"])
