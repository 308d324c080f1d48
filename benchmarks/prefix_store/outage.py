"""Cost of a Redis that is gone or does not answer to requests once its breaker is open."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness import note
from benchmarks.prefix_store.workbench import Workbench
from engine.cache.connector import SharedPrefixes
from kvstore.faulty_server import FaultyServer, Spoil
from kvstore.redis.embedded import EmbeddedServer
from kvstore.types import Wanted
from turnout.types import Sharing

SERVER_BYTES = 32 << 20
OPEN_WITHIN_S = 60.0
TOKENS_PER_S = 2000.0  # of the engine, as a look-up assumes it


@dataclass(frozen=True, slots=True)
class Outage:
    """One kind of outage; milliseconds.

    Attributes:
        kind: of outage.
        opening: what the slowest look-up took before the breaker was open.
        look_up_p50: of look-ups of a long prompt while it is open.
        look_up_p99: likewise.
        off_p50: first token of a short prompt without a store.
        off_p99: likewise.
        added_p50: by how much that of requests with the store is longer.
        added_p99: likewise.
        requests: on each side.
    """

    kind: str
    opening: float
    look_up_p50: float
    look_up_p99: float
    off_p50: float
    off_p99: float
    added_p50: float
    added_p99: float
    requests: int


@contextmanager
def gone(folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """A Redis on a socket, and what ends it."""
    with EmbeddedServer(folder, SERVER_BYTES) as server:
        yield server.url, server.stop


@contextmanager
def stalled(folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """A Redis over TCP, and what makes it fall silent with its connections open."""
    with EmbeddedServer(folder, SERVER_BYTES) as server, FaultyServer(server.address.endpoints[0]) as front:

        def stall() -> None:
            front.spoil = Spoil("stall")

        yield front.url, stall


KINDS = {"server gone": gone, "server silent": stalled}


async def measure(bench: Workbench, prefix: int, requests: int, seconds: float, seed: int = 3) -> list[Outage]:
    """Each kind of outage.

    Args:
        bench: the engine.
        prefix: tokens of the prompts that are looked up.
        requests: for a first token, with the store and without.
        seconds: for look-ups one after the other: several cooldowns, so that probes are met.
        seed: of the tokens.
    """
    draw, found = random.Random(seed), []
    for kind, server in KINDS.items():
        note(f"outage: {kind}")
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turnout-")))
            url, strike = stack.enter_context(server(folder))
            async with bench.store(url, host_memory_bytes=256 << 20) as bridge:
                await bench.first_token(bridge, bench.tokens(draw, 2 * bridge.store.chunk_tokens))
                strike()
                opening = await _open_breaker(bench, bridge, draw, prefix)
                looked_up = await _look_ups(bench, bridge, draw, prefix, seconds)
                off, on = await _first_tokens(bench, bridge, draw, requests)
        found.append(summary(kind, opening, looked_up, off, on))
    return found


def summary(kind: str, opening: float, looked_up: list[float], off: list[float], on: list[float]) -> Outage:
    """What timings in seconds come to."""
    p50, p99 = _percentiles(looked_up)
    off50, off99 = _percentiles(off)
    on50, on99 = _percentiles(on)
    return Outage(kind, 1e3 * opening, p50, p99, off50, off99, on50 - off50, on99 - off99, len(on))


def _percentiles(seconds: list[float]) -> tuple[float, float]:
    """Median and 99th percentile, in milliseconds."""
    low, high = np.percentile(seconds, [50, 99])
    return 1e3 * float(low), 1e3 * float(high)


async def _open_breaker(bench: Workbench, bridge: SharedPrefixes, draw: random.Random, prefix: int) -> float:
    """Look up until the store is given up; the slowest, seconds."""
    slowest = 0.0
    end = time.monotonic() + OPEN_WITHIN_S
    while time.monotonic() < end:
        if bridge.store.health() == "off":
            return slowest
        slowest = max(slowest, await _look_up(bench, bridge, bench.tokens(draw, prefix)))
    raise RuntimeError(f"the breaker was not open after {OPEN_WITHIN_S:g} s")


async def _look_ups(
    bench: Workbench, bridge: SharedPrefixes, draw: random.Random, prefix: int, seconds: float
) -> list[float]:
    found: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found.append(await _look_up(bench, bridge, bench.tokens(draw, prefix)))
    return found


async def _look_up(bench: Workbench, bridge: SharedPrefixes, tokens: list[int]) -> float:
    """Seconds of one, digests included, as before a new sequence's first forward."""

    def compute_s(start: int, stop: int) -> float:
        return (stop - start) / TOKENS_PER_S

    began = time.perf_counter()
    chain = bridge.store.chain(Sharing.private("outage"))
    found = await bridge.store.fetch(Wanted(tokens, chain, 0, False, "outage", compute_s))
    if found.chunks:
        raise RuntimeError("a prompt that was never written was found")
    return time.perf_counter() - began


async def _first_tokens(
    bench: Workbench, bridge: SharedPrefixes, draw: random.Random, requests: int
) -> tuple[list[float], list[float]]:
    """Seconds to the first token of short prompts, without the store and with it, in turn."""
    length = 2 * bridge.store.chunk_tokens
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for index in range(requests):
        for on in (False, True) if index % 2 else (True, False):
            answered = await bench.first_token(bridge if on else None, bench.tokens(draw, length), fresh=False)
            seconds[on].append(answered.seconds)
    return seconds[False], seconds[True]
