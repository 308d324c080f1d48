"""A long mixed load beyond the engine's capacity: memory stays flat, every block comes back, every answer is right."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Report, command_line, note, run
from experiments.machine import describe
from experiments.pairs import open_pair
from experiments.process_memory import own_bytes
from experiments.replay import Verdict, answer, compare
from pool.local_pool import LocalPool
from turnout.calls import GenerateCall, TokenOut
from turnout.errors import Code, TurnoutError
from turnout.types import SamplingParams

OVERLOAD = 1.2
SAMPLE = 200
CLOSED_LOOP = 32
CANCELLED_SHARE = 0.15
# Of the load's time: what comes before is warm-up (caches fill, memory pools grow).
WARM_UP = 0.3
MOST_GROWTH = 0.03
UNLOADED = "not beyond capacity: the machine has become faster since the load's rate was chosen"
TENANTS = {"alpha": 0.6, "beta": 0.3, "gamma": 0.1}
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {"model": "large"}),
    ("plain", {"model": "small"}),
    ("speculative", {"length": "fixed", "draft_length": 4}),
    ("entropy_adaptive", {"threshold": 0.5, "window": 3, "min_stay": 4}),
    ("entropy_adaptive", {"threshold": 0.2, "window": 2, "min_stay": 2, "catch_up": "shadow"}),
    ("sentence_lead", {"lead_tokens": 3, "catch_up": "eager"}),
    ("random_switch", {"share": 0.4, "mean_run": 6.0, "min_stay": 2}),
]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 40, "presence_penalty": 0.4},
    {"temperature": 0.6, "repetition_penalty": 1.1},
]


class Traffic:
    """Random calls: all methods, several tenants, short and long prompts, some with a prefix in common.

    Args:
        pool: whose vocabulary and context they fit.
        seed: of everything that is random.
    """

    def __init__(self, pool: LocalPool, seed: int) -> None:
        self.random = random.Random(seed)
        self._pool = pool
        self._count = 0
        self._prefixes = [self._tokens(length) for length in (120, 240, 360)]

    def _tokens(self, length: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(self._pool.vocab_size) for _ in range(length))

    def call(self) -> GenerateCall:
        """The next call."""
        choose = self.random
        self._count += 1
        shared = choose.choice(self._prefixes) if choose.random() < 0.4 else ()
        prompt = shared + self._tokens(int(4 * 60 ** choose.random()))
        method, params = choose.choice(METHODS)
        limit = min(choose.randint(4, 80), self._pool.max_length - len(prompt))
        sampling = SamplingParams(
            max_tokens=limit, seed=choose.randrange(2**31), ignore_eos=choose.random() < 0.5, **choose.choice(SAMPLING)
        )
        tenant = choose.choices(list(TENANTS), list(TENANTS.values()))[0]
        return GenerateCall(f"soak-{self._count}", self._pool.name, sampling, prompt, None, method, params, tenant)


@dataclass
class Tally:
    """Outcomes of the calls.

    `sample` holds calls and their answers, each finished call with the same chance; `memory` is (seconds since the
    load began, bytes).
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    tokens: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    sample: list[tuple[GenerateCall, list[TokenOut]]] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """The soak's result.

    Attributes:
        capacity_per_s: calls that a closed loop finished in a second, before the load and after it.
        memory_bytes: mean of what the process itself allocated.
        growth: of it after warm-up, fitted, as a share of its mean.
        memory: its samples, (seconds since the load began, bytes).
    """

    seconds: float
    offered_per_s: float
    capacity_per_s: tuple[float, float]
    outcomes: dict[str, int]
    tokens_per_s: float
    median_seconds: dict[str, float]
    forward_share: float
    memory_bytes: float
    growth: float
    leaks: list[str]
    faults: list[str]
    compared: dict[str, int]
    memory: list[tuple[float, int]] = field(default_factory=list)

    @property
    def overloaded(self) -> bool:
        """Whether the load was beyond what the machine could do at its end as well."""
        return self.offered_per_s > self.capacity_per_s[1]

    @property
    def failures(self) -> list[str]:
        """What is not as it must be."""
        found = [*self.leaks, *self.faults]
        if self.growth > MOST_GROWTH:
            found.append(f"memory grew by {self.growth:.1%} after warm-up")
        if self.compared.get(Verdict.WRONG.value):
            found.append(f"{self.compared[Verdict.WRONG.value]} answers differ from what their requests give alone")
        return found


async def capacity(pool: LocalPool, traffic: Traffic, seconds: float) -> float:
    """Calls answered per second when there is always enough to do."""
    answered, end = 0, time.perf_counter() + seconds

    async def client() -> None:
        nonlocal answered
        while time.perf_counter() < end:
            await answer(pool, traffic.call())
            answered += 1

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(CLOSED_LOOP)))
    return answered / (time.perf_counter() - started)


async def one_call(pool: LocalPool, traffic: Traffic, tally: Tally, sample: int) -> None:
    """Answer one call, or give it up at a random moment."""
    call = traffic.call()
    patience = traffic.random.expovariate(2.0) if traffic.random.random() < CANCELLED_SHARE else None
    started = time.perf_counter()
    try:
        async with asyncio.timeout(patience):
            tokens = await answer(pool, call)
    except TimeoutError:
        tally.outcomes["cancelled"] += 1
    except TurnoutError as error:
        tally.outcomes["refused" if error.code is Code.RESOURCE_EXHAUSTED else "failed"] += 1
        if error.code is not Code.RESOURCE_EXHAUSTED:
            tally.faults.append(f"{call.method}: {error}")
    except Exception as error:  # a soak reports every fault at its end
        tally.outcomes["failed"] += 1
        tally.faults.append(f"{call.method}: {error!r}")
    else:
        tally.outcomes["finished"] += 1
        tally.tokens += len(tokens)
        tally.seconds.setdefault(call.tenant, []).append(time.perf_counter() - started)
        place = traffic.random.randrange(tally.outcomes["finished"])
        if len(tally.sample) < sample:
            tally.sample.append((call, tokens))
        elif place < sample:
            tally.sample[place] = (call, tokens)


async def load(pool: LocalPool, traffic: Traffic, rate: float, seconds: float, tally: Tally, sample: int) -> None:
    """Calls that come at random times whatever the pool does, for a number of seconds; returns when all have ended."""
    started = time.perf_counter()
    interval = max(seconds / 200, 0.05)
    running: set[asyncio.Task[None]] = set()
    due = next_sample = started
    while (now := time.perf_counter()) < started + seconds:
        if now >= next_sample:
            tally.memory.append((now - started, own_bytes(os.getpid())))
            next_sample += interval
        if now >= due:
            task = asyncio.create_task(one_call(pool, traffic, tally, sample))
            running.add(task)
            task.add_done_callback(running.discard)
            due += traffic.random.expovariate(rate)
        await asyncio.sleep(max(min(due, next_sample) - time.perf_counter(), 0.0))
    await asyncio.gather(*running)


def leaks(pool: LocalPool) -> list[str]:
    """What an idle pool still holds though it should not."""
    stats = pool.stats()
    held = {"requests": stats.requests, "sequences": stats.sequences, "blocks": stats.used_blocks}
    found = [f"{count} {name} are still held" for name, count in held.items() if count]
    for name, engine in pool.engines.items():
        try:
            engine.pool.check_integrity()
        except AssertionError as error:
            found.append(f"{name}: {error}")
    return found


def growth(memory: list[tuple[float, int]]) -> float:
    """Fitted growth over the time after warm-up, as a share of the mean; 0.0 with fewer than three samples."""
    if not memory:
        return 0.0
    after = [sample for sample in memory if sample[0] >= WARM_UP * memory[-1][0]]
    if len(after) < 3:
        return 0.0
    times, sizes = np.array(after, dtype=np.float64).T
    slope = np.polyfit(times, sizes, 1)[0]
    return float(slope * (times[-1] - times[0]) / sizes.mean())


async def soak(
    pool: LocalPool, seconds: float, sample: int = SAMPLE, seed: int = 0, note: Callable[[str], None] = lambda _: None
) -> Outcome:
    """Load a pool beyond its capacity, then look at what is left and answer a sample of the calls again.

    Args:
        pool: in float32, with nothing else to do.
        seconds: of the load; warming up and finding the capacity take a sixth of it before, and a tenth after.
        sample: finished calls that are answered again, alone.
        seed: of the traffic.
        note: called with what happens.
    """
    traffic, tally = Traffic(pool, seed), Tally()
    tenth = max(seconds / 10, 4.0)
    await capacity(pool, traffic, tenth / 2)  # until steps are compiled
    before = await capacity(pool, traffic, tenth)
    rate = OVERLOAD * before
    note(f"offering {rate:.1f} calls per second for {seconds:.0f} s")
    forwards = sum(engine.batcher.forward_seconds for engine in pool.engines.values())
    started = time.perf_counter()
    await load(pool, traffic, rate, seconds, tally, sample)
    elapsed = time.perf_counter() - started
    forwards = sum(engine.batcher.forward_seconds for engine in pool.engines.values()) - forwards
    await _let_go(pool)
    left = leaks(pool)
    after = await capacity(pool, traffic, tenth)
    note(f"answering {len(tally.sample)} calls again, alone")
    compared = Counter[str]()
    for call, tokens in tally.sample:
        compared[(await compare(pool, call, tokens)).value] += 1
    return Outcome(
        seconds=elapsed,
        offered_per_s=rate,
        capacity_per_s=(before, after),
        outcomes=dict(tally.outcomes),
        tokens_per_s=tally.tokens / elapsed,
        median_seconds={tenant: float(np.median(times)) for tenant, times in sorted(tally.seconds.items())},
        forward_share=forwards / elapsed,
        memory_bytes=float(np.mean([size for _, size in tally.memory])),
        growth=growth(tally.memory),
        memory=tally.memory,
        leaks=left,
        faults=tally.faults[:20],
        compared=dict(compared),
    )


async def _let_go(pool: LocalPool) -> None:
    """Give the forward in progress, if any, time to give back what cancelled calls held."""
    for _ in range(500):
        if not (pool.stats().used_blocks or pool.stats().waiting):
            break
        await asyncio.sleep(0.01)


def page(found: Outcome, machine: dict[str, str] | None = None) -> Report:
    """The report of a run."""
    report = Report(
        "Soak",
        f"`make soak`. float32; tenants {TENANTS}, {len(METHODS)} methods, {CANCELLED_SHARE:.0%} of the calls cancelled"
        " at a random moment.",
        machine=machine,
    )
    report.facts(
        {
            "load": f"{found.offered_per_s:.1f} calls/s, {OVERLOAD:g} times the capacity before it",
            f"calls/s of a closed loop of {CLOSED_LOOP}": "{:.1f} before, {:.1f} after".format(*found.capacity_per_s),
            "duration": f"{found.seconds:.0f} s",
            "calls": ", ".join(f"{count} {name}" for name, count in sorted(found.outcomes.items())),
            "tokens/s of finished calls": f"{found.tokens_per_s:.0f}",
            "median seconds by tenant": ", ".join(f"{name} {s:.2f}" for name, s in found.median_seconds.items()),
            "time spent in forwards": f"{found.forward_share:.1%}",
            "memory": f"{found.memory_bytes / 2**20:.0f} MiB",
            "growth after warm-up": f"{found.growth:+.2%} (at most {MOST_GROWTH:.0%})",
            "left behind": "; ".join(found.leaks) or "nothing",
            "answers compared with their solo runs": ", ".join(
                f"{n} {name}" for name, n in sorted(found.compared.items())
            ),
            "verdict": "; ".join(found.failures or ["passed" if found.overloaded else UNLOADED]),
        }
    )
    report.failures += found.failures or ([] if found.overloaded else [UNLOADED])
    report.values |= asdict(found)
    return report


async def measure(options: argparse.Namespace) -> Report:
    """Load a pair in float32."""
    machine, pair = describe(), open_pair(options.pair)
    pool = LocalPool.load(pair.pool, pair.in_dtype("float32"))
    try:
        return page(await soak(pool, 60 * options.minutes, options.sample, options.seed, note), machine)
    finally:
        await pool.close()


def parser() -> argparse.ArgumentParser:
    """Make the options."""
    made = command_line(__doc__, Path("docs/results/soak.md"), rounds=None, takes_pair=True, minutes=0.5)
    made.add_argument("--minutes", type=float, default=20.0)
    made.add_argument("--sample", type=int, default=SAMPLE)
    made.add_argument("--seed", type=int, default=0)
    return made


if __name__ == "__main__":
    run(parser(), measure)
