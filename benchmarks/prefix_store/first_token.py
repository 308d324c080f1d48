"""Time to the first token after a prefix that the store has, over that of computing it."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from dataclasses import dataclass

from benchmarks.harness import Side, note, take_turns
from benchmarks.prefix_store.workbench import Answered, Workbench, settled
from engine.cache.connector import SharedPrefixes
from experiments.stats.intervals import Interval
from kvstore.profiles import Profile
from training.kv_profiles import Shapes, read_kv

SUFFIX_TOKENS = 8
PROFILED_TOKENS = 400
PROFILED = 5
RECOMPUTE = "recomputed"
GOAL = "exact values from Redis, unix socket"
TCP = "exact values from Redis, TCP"
MEMORY = "host memory"
BLOCKS = "the engine's own blocks"


@dataclass(frozen=True, slots=True)
class FirstToken:
    """One way of coming by a prefix: medians over rounds, with the smallest and largest.

    Attributes:
        way: its name.
        seconds: to the first token.
        ratio: of that to recomputing in the same round.
        found: prompt tokens that were not computed, in the round that found the fewest.
        bytes: read from Redis for one request; 0 where nothing is.
    """

    way: str
    seconds: Interval
    ratio: Interval
    found: int
    bytes: int


@dataclass(frozen=True, slots=True)
class _Way:
    """Way to get a prefix: the store it comes from, and what must be done before each measurement."""

    name: str
    bridge: SharedPrefixes | None
    lossy: bool = False
    prime: bool = False  # the engine's blocks hold the prefix


_Reading = tuple[Answered, int]  # with the bytes that were read


async def measure(
    bench: Workbench, unix_url: str, tcp_url: str, codecs: tuple[str, ...], prefix: int, rounds: int, seed: int = 0
) -> list[FirstToken]:
    """Measure all ways, which take turns.

    Args:
        bench: the engine.
        unix_url: a Redis, over its socket.
        tcp_url: the same, over TCP.
        codecs: lossy ones.
        prefix: tokens.
        rounds: that count.
        seed: of the tokens.
    """
    draw = random.Random(seed)
    common = bench.tokens(draw, prefix)
    if any(name.startswith("cachegen") for name in codecs):
        bench.profiled({"cachegen": await profile(bench, draw)})
    for codec in ("raw", *codecs):
        note(f"first token: filling Redis with {codec}")
        await bench.fill(unix_url, common, codec)
    async with AsyncExitStack() as stack:
        ways = await _open(bench, unix_url, tcp_url, codecs, common, stack)
        turns = await take_turns([_side(bench, way, common, draw) for way in ways], rounds)
    return [
        FirstToken(
            way.name,
            turns.spread(way.name, _seconds),
            turns.ratio(way.name, RECOMPUTE, _seconds),
            min(each.cached for each, _ in turns.readings[way.name]),
            max(size for _, size in turns.readings[way.name]),
        )
        for way in ways
    ]


def _side(bench: Workbench, way: _Way, common: list[int], draw: random.Random) -> Side[_Reading]:
    async def turn(_: int) -> _Reading:
        return await _once(bench, way, common, common + bench.tokens(draw, SUFFIX_TOKENS))

    return Side(way.name, turn)


def _seconds(reading: _Reading) -> float:
    return reading[0].seconds


async def _open(
    bench: Workbench, unix_url: str, tcp_url: str, codecs: tuple[str, ...], common: list[int], stack: AsyncExitStack
) -> list[_Way]:
    unix = await stack.enter_async_context(bench.store(unix_url))
    tcp = await stack.enter_async_context(bench.store(tcp_url))
    memory = await stack.enter_async_context(bench.store(unix_url, host_memory_bytes=256 << 20, admission="always"))
    await bench.first_token(memory, common)  # what it does not find in Redis is offered, so that it holds everything
    await settled(memory)
    ways = [
        _Way(RECOMPUTE, None),
        _Way(GOAL, unix),
        _Way(TCP, tcp),
        _Way(MEMORY, memory),
        _Way(BLOCKS, None, prime=True),
    ]
    for codec in codecs:
        bridge = await stack.enter_async_context(bench.store(unix_url, codecs=(codec,)))
        ways.append(_Way(f"{codec} from Redis, unix socket", bridge, lossy=True))
    return ways


async def _once(bench: Workbench, way: _Way, common: list[int], prompt: list[int]) -> _Reading:
    """One first token, and the bytes that were read for it."""
    if way.prime:
        await bench.first_token(None, common)
    before = way.bridge.store.stats().bytes_read if way.bridge is not None else 0
    answered = await bench.first_token(way.bridge, prompt, lossy=way.lossy, fresh=not way.prime)
    if way.bridge is None:
        if answered.cached and not way.prime:
            raise RuntimeError(f"{answered.cached} tokens were still in the engine's blocks")
        return answered, 0
    size = way.bridge.store.stats().bytes_read - before
    await settled(way.bridge)  # blocks that wait to be written would be found by the next
    return answered, size


async def profile(bench: Workbench, draw: random.Random) -> Profile:
    """What CacheGen must know of the model, from random tokens: it was made of random weights too."""
    note("first token: profiling the model for cachegen")
    prompts = [bench.tokens(draw, PROFILED_TOKENS) for _ in range(PROFILED)]
    shapes = Shapes()
    caches = [await read_kv(bench.engine, prompt) for prompt in prompts]
    for kv in caches:
        shapes.add(kv)
    histograms = shapes.histograms()
    for kv in caches:
        histograms.add(kv)
    return Profile(b"random", {}, histograms.tensors())
