"""Cost of writing to the store, and of look-ups without a match, to requests that decode."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.harness import Side, Turns, note, take_turns
from benchmarks.prefix_store.workbench import Workbench, settled
from decoding.sequence import Sequence
from engine.cache.connector import SharedPrefixes
from experiments.stats.intervals import Interval
from turnout.types import SamplingParams

RUNNING = 8
OWN_TOKENS = 20
WARM_TOKENS = 8
UNMATCHED_TOKENS = 70
LIMIT_S = 120.0
ON, OFF = "with a store", "without a store"


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of requests while prompts were read, all in tokens per second, and what was written.

    Attributes:
        decoded: by the running requests together.
        read: of the prompts.
        written: bytes.
        dropped: chunks that were offered and not written.
    """

    decoded: float
    read: float
    written: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class WriteBehind:
    """Rates with the store over those without, round by round: medians, with the smallest and largest.

    Attributes:
        with_prompts_off: tokens/s decoded while prompts were read, no store.
        with_prompts: ... with it, everything written, over that.
        prompts: tokens/s of these prompts, likewise.
        written_mib: in one round.
        dropped: chunks in all rounds.
        unmatched_off: tokens/s decoded after short prompts of which nothing is stored, no store.
        unmatched: ... with it, as configured by default, over that.
    """

    with_prompts_off: Interval
    with_prompts: Interval
    prompts: Interval
    written_mib: Interval
    dropped: int
    unmatched_off: Interval
    unmatched: Interval


async def measure(
    bench: Workbench, url: str, prefix: int, prompts: int, tokens: int, rounds: int, seed: int = 1
) -> WriteBehind:
    """Measure decoding with a store and without one, which take turns.

    Args:
        bench: the engine.
        url: of a Redis.
        prefix: tokens of each prompt that is read.
        prompts: read one after the other in one measurement.
        tokens: decoded by each request where no prompt is read.
        rounds: that count.
        seed: of the tokens.
    """
    draw = random.Random(seed)
    async with (
        bench.store(url, admission="always", host_memory_bytes=256 << 20) as writing,
        bench.store(url, host_memory_bytes=256 << 20) as default,
    ):
        note("write-behind: with prompts")
        with_prompts = await take_turns(
            [
                Side(ON, lambda _: decode_with_prompts(bench, writing, draw, prefix, prompts)),
                Side(OFF, lambda _: decode_with_prompts(bench, None, draw, prefix, prompts)),
            ],
            rounds,
        )
        note("write-behind: nothing matches")
        unmatched = await take_turns(
            [
                Side(ON, lambda _: decode_unmatched(bench, default, draw, tokens)),
                Side(OFF, lambda _: decode_unmatched(bench, None, draw, tokens)),
            ],
            rounds,
        )
    return summary(with_prompts, unmatched)


def summary(with_prompts: Turns[Rates], unmatched: Turns[float]) -> WriteBehind:
    """Figures of the rounds, of the sides `ON` and `OFF`."""
    return WriteBehind(
        with_prompts.spread(OFF, lambda each: each.decoded),
        with_prompts.ratio(ON, OFF, lambda each: each.decoded),
        with_prompts.ratio(ON, OFF, lambda each: each.read),
        with_prompts.spread(ON, lambda each: each.written / 2**20),
        sum(each.dropped for each in with_prompts.readings[ON]),
        unmatched.spread(OFF),
        unmatched.ratio(ON, OFF),
    )


async def decode_with_prompts(
    bench: Workbench, bridge: SharedPrefixes | None, draw: random.Random, prefix: int, prompts: int
) -> Rates:
    """Rates while new prompts are read during the decoding of requests."""
    engine = bench.engine
    engine.shared = bridge
    engine.pool.clear_cached()
    before = bridge.store.stats() if bridge is not None else None
    room = engine.max_length - OWN_TOKENS
    running = [_sequence(bench, draw, OWN_TOKENS, room) for _ in range(RUNNING)]
    tasks = [asyncio.create_task(engine.decode(seq)) for seq in running]
    await _until(lambda: all(len(seq.generated) >= WARM_TOKENS for seq in running))
    first, began = sum(len(seq.generated) for seq in running), time.perf_counter()
    for _ in range(prompts):
        prompt = _sequence(bench, draw, prefix, 1)
        await engine.extend(prompt)
        engine.release(prompt)
    decoded, seconds = sum(len(seq.generated) for seq in running) - first, time.perf_counter() - began
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for seq in running:
        engine.release(seq)
    if bridge is None or before is None:
        return Rates(decoded / seconds, prompts * prefix / seconds)
    await settled(bridge)
    after = bridge.store.stats()
    written = after.bytes_written - before.bytes_written
    dropped = sum(after.dropped.values()) - sum(before.dropped.values())
    return Rates(decoded / seconds, prompts * prefix / seconds, written, dropped)


async def decode_unmatched(bench: Workbench, bridge: SharedPrefixes | None, draw: random.Random, tokens: int) -> float:
    """Tokens per second of requests with new prompts, from the first look-up to the last token."""
    engine = bench.engine
    engine.shared = bridge
    engine.pool.clear_cached()
    running = [_sequence(bench, draw, UNMATCHED_TOKENS, tokens) for _ in range(RUNNING)]
    began = time.perf_counter()
    await asyncio.gather(*(engine.decode(seq) for seq in running))
    seconds = time.perf_counter() - began
    for seq in running:
        engine.release(seq)
    return RUNNING * tokens / seconds


def _sequence(bench: Workbench, draw: random.Random, length: int, max_tokens: int) -> Sequence:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Sequence(bench.tokens(draw, length), sampling, 0)


async def _until(condition: Callable[[], bool]) -> None:
    """Let the engine run until something is so."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.001)
