"""What writing to the store, and looking into it for nothing, costs requests that decode."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.harness import note
from benchmarks.prefix_store.workbench import Workbench, settled
from decoding.sequence import Sequence
from engine.cache.connector import SharedPrefixes
from experiments.stats.intervals import Interval, spread
from turnout.types import SamplingParams

RUNNING = 8
OWN_TOKENS = 20
WARM_TOKENS = 8
UNMATCHED_TOKENS = 70
LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Beside:
    """What requests got while prompts were read beside them, all in tokens per second, and what was written.

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
        beside_off: tokens/s decoded while prompts were read, no store.
        beside: ... with it, everything written, over that.
        prompts: tokens/s of these prompts, likewise.
        written_mib: in one round.
        dropped: chunks in all rounds.
        unmatched_off: tokens/s decoded after short prompts of which nothing is stored, no store.
        unmatched: ... with it, as configured by default, over that.
    """

    beside_off: Interval
    beside: Interval
    prompts: Interval
    written_mib: Interval
    dropped: int
    unmatched_off: Interval
    unmatched: Interval


async def measure(
    bench: Workbench, url: str, prefix: int, prompts: int, tokens: int, rounds: int, seed: int = 1
) -> WriteBehind:
    """Take turns between store and none; the first round is thrown away.

    Args:
        bench: the engine.
        url: of a Redis.
        prefix: tokens of each prompt that is read.
        prompts: read one after the other in one measurement.
        tokens: decoded by each request where nothing is read beside.
        rounds: that count.
        seed: of the tokens.
    """
    draw = random.Random(seed)
    async with (
        bench.store(url, admission="always", host_memory_bytes=256 << 20) as writing,
        bench.store(url, host_memory_bytes=256 << 20) as default,
    ):
        beside: list[dict[bool, Beside]] = []
        unmatched: list[dict[bool, float]] = []
        for index in range(rounds + 1):
            note(f"write-behind: round {index} of {rounds}")
            order = (False, True) if index % 2 else (True, False)
            beside.append(
                {on: await decode_beside(bench, writing if on else None, draw, prefix, prompts) for on in order}
            )
            unmatched.append({on: await decode_unmatched(bench, default if on else None, draw, tokens) for on in order})
    return summary(beside[1:], unmatched[1:])


def summary(beside: list[dict[bool, Beside]], unmatched: list[dict[bool, float]]) -> WriteBehind:
    """What rounds come to; by whether there was a store."""
    return WriteBehind(
        spread([each[False].decoded for each in beside]),
        spread([each[True].decoded / each[False].decoded for each in beside]),
        spread([each[True].read / each[False].read for each in beside]),
        spread([each[True].written / 2**20 for each in beside]),
        sum(each[True].dropped for each in beside),
        spread([each[False] for each in unmatched]),
        spread([each[True] / each[False] for each in unmatched]),
    )


async def decode_beside(
    bench: Workbench, bridge: SharedPrefixes | None, draw: random.Random, prefix: int, prompts: int
) -> Beside:
    """Rates while prompts that nobody knows are read beside requests that decode."""
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
        return Beside(decoded / seconds, prompts * prefix / seconds)
    await settled(bridge)
    after = bridge.store.stats()
    written = after.bytes_written - before.bytes_written
    dropped = sum(after.dropped.values()) - sum(before.dropped.values())
    return Beside(decoded / seconds, prompts * prefix / seconds, written, dropped)


async def decode_unmatched(bench: Workbench, bridge: SharedPrefixes | None, draw: random.Random, tokens: int) -> float:
    """Tokens per second of requests whose prompts nobody knows, from the first look-up to the last token."""
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
