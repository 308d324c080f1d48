"""Decisions of the store between fetching and computing, on links of several speeds and engines of several speeds.

Chunks really travel, through a link that holds them back; computing is taken to last as long as the engine's own
forecast says, or a tenth or a hundredth of that, as on faster devices. What would have been best is known from a read
of everything just before: when each chunk was there, and what computing the rest would have taken from then on.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.harness import note
from benchmarks.prefix_store.link import SlowLink
from kvstore.base import ByteStore
from kvstore.build import SharedStore, build_stores
from kvstore.keys import Keyring
from kvstore.opening import open_store
from kvstore.store import PrefixStore
from kvstore.types import ModelLayout, Offer, Wanted
from turnout.config import KVStoreConfig
from turnout.types import Sharing

Seconds = Callable[[int, int], float]  # (a, b): to compute tokens a to b - 1 after those before them
Kind = tuple[int, bool]  # speed of the engine, whether the link is known

LINKS = (0.05, 0.2, 1.0, None)  # 10^9 bytes a second; None: as fast as Redis is here
SPEEDS = (1, 10, 100)  # of the engine, in this machine's
SHARING = Sharing.private("decisions")
MODEL = "large"
NEAR, SLACK_S = 1.1, 0.002  # a decision is right if it costs no more than this times the best, and that on top
FORCED_S = 1e6
BUDGET_S = 30.0


@dataclass(frozen=True, slots=True)
class Trial:
    """One decision; seconds until everything was there, fetched or computed.

    Attributes:
        took: as decided.
        best: of all numbers of chunks to fetch, 0 and all included.
        compute: computing everything.
        fetch: fetching everything that is stored.
        chunks: fetched.
    """

    took: float
    best: float
    compute: float
    fetch: float
    chunks: int

    @property
    def right(self) -> bool:
        """Whether it was about as good as the best."""
        return self.took <= NEAR * self.best + SLACK_S


@dataclass(frozen=True, slots=True)
class Decisions:
    """Decisions on one link for one engine.

    Attributes:
        link: 10^9 bytes a second; None: no limit.
        speed: of the engine, in this machine's.
        known: whether the link had been used just before.
        right: share of the decisions that were.
        regret_ms: mean time lost against the best, milliseconds.
        took: mean seconds, as decided.
        best: mean seconds of the best.
        compute: mean seconds of computing everything.
        fetch: mean seconds of fetching everything.
        fetched: mean share of the chunks that were fetched.
        trials: how many.
    """

    link: float | None
    speed: int
    known: bool
    right: float
    regret_ms: float
    took: float
    best: float
    compute: float
    fetch: float
    fetched: float
    trials: int


def best_split(arrivals: list[float], seconds: Seconds, chunk_tokens: int, length: int) -> float:
    """The least time to have everything: chunks up to some number fetched, the rest computed after that.

    Args:
        arrivals: seconds after which each chunk is there, from the first on.
        seconds: to compute.
        chunk_tokens: of a chunk.
        length: tokens of the prompt.
    """
    totals = [seconds(0, length)]
    totals += [at + rest_s(seconds, chunk_tokens * count, length) for count, at in enumerate(arrivals, start=1)]
    return min(totals)


def rest_s(seconds: Seconds, start: int, length: int) -> float:
    """Time to compute what follows `start`; the last token is computed in any case."""
    start = min(start, length - 1)
    return seconds(start, length)


def summary(link: float | None, speed: int, known: bool, trials: list[Trial], most: int) -> Decisions:
    """What trials come to; `most`: chunks that are stored."""
    return Decisions(
        link,
        speed,
        known,
        float(np.mean([each.right for each in trials])),
        1e3 * float(np.mean([max(each.took - each.best, 0.0) for each in trials])),
        float(np.mean([each.took for each in trials])),
        float(np.mean([each.best for each in trials])),
        float(np.mean([each.compute for each in trials])),
        float(np.mean([each.fetch for each in trials])),
        float(np.mean([each.chunks / most for each in trials])),
        len(trials),
    )


async def measure(
    url: str, key: bytes, layout: ModelLayout, seconds: Seconds, length: int, trials: int, seed: int = 4
) -> list[Decisions]:
    """Every link with every engine, the link known and unknown.

    Args:
        url: of a Redis.
        key: root key.
        layout: of the model.
        seconds: this engine's forecast.
        length: tokens of the prompt; what fills chunks is stored.
        trials: of each.
        seed: of the tokens.
    """
    draw = random.Random(seed)
    tokens = [draw.randrange(4, 1000) for _ in range(length)]
    config = KVStoreConfig(url="off", admission="always", host_memory_bytes=0, fetch_timeout_s=BUDGET_S)
    address = config.model_copy(update={"url": url})
    redis = await asyncio.to_thread(open_store, address)
    bench = _Bench(config, redis, Keyring(key), layout, tokens, seconds)
    try:
        most = await bench.fill()
        found = []
        for link in LINKS:
            note(f"decisions: {'no limit' if link is None else f'{link:g} GB/s'}")
            repeats = [await bench.trials(link) for _ in range(trials)]
            for known in (True, False):
                for speed in SPEEDS:
                    cell = [each[speed, known] for each in repeats]
                    found.append(summary(link, speed, known, cell, most))
        return found
    finally:
        await asyncio.to_thread(redis.close)


class _Bench:
    """One prompt, stored, and the stores that read it."""

    def __init__(
        self,
        config: KVStoreConfig,
        redis: ByteStore,
        keyring: Keyring,
        layout: ModelLayout,
        tokens: list[int],
        seconds: Seconds,
    ) -> None:
        self._config = config
        self._redis = redis
        self._keyring = keyring
        self._layout = layout
        self._tokens = tokens
        self._seconds = seconds

    async def fill(self) -> int:
        """Store the prompt's chunks; how many there are."""
        async with self._opened(self._redis) as (stores, store):
            links = store.chain(SHARING).links(self._tokens, len(self._tokens) // store.chunk_tokens)
            kv = torch.randn(store.encodings.chunk_size).to(self._layout.dtype)
            for link in links:
                store.offer(Offer(link, "decisions", lambda: kv, lambda: None))
                # One after the other: the queue is as short as configured.
                if not await store.settle():
                    raise TimeoutError("a chunk was not written in time")
            written = store.stats().writes
            if written != len(links) * len(store.encodings.groups):
                raise RuntimeError(f"{written} values written of {len(links)} chunks")
            await asyncio.to_thread(stores.settle)
            return len(links)

    async def trials(self, link: float | None) -> dict[Kind, Trial]:
        """One decision of each kind, and what the choices would have cost."""
        slow = SlowLink(self._redis, None if link is None else 1e9 * link)
        found: dict[Kind, tuple[float, int]] = {}
        async with self._opened(slow) as (_, store):
            await self._fetch(store, _endless)  # the first read only learns how fast the link is
            slow.arrivals.clear()
            began = time.monotonic()
            count = await self._fetch(store, _endless)
            arrivals = _chunk_arrivals(slow.arrivals, began, time.monotonic(), len(store.encodings.groups))
            if count != len(arrivals):
                raise RuntimeError(f"{count} of {len(arrivals)} chunks were read at once")
            size = store.chunk_tokens
            for speed in SPEEDS:
                found[speed, True] = await self._decided(store, self._faster(speed))
        for speed in SPEEDS:
            async with self._opened(slow) as (_, store):
                found[speed, False] = await self._decided(store, self._faster(speed))
        return {
            kind: self._judged(arrivals, size, self._faster(kind[0]), took, chunks)
            for kind, (took, chunks) in found.items()
        }

    def _faster(self, speed: int) -> Seconds:
        """Return the forecast of an engine `speed` times as fast."""
        return lambda start, stop: self._seconds(start, stop) / speed

    def _judged(self, arrivals: list[float], size: int, seconds: Seconds, took: float, chunks: int) -> Trial:
        length = len(self._tokens)
        return Trial(
            took,
            best_split(arrivals, seconds, size, length),
            seconds(0, length),
            arrivals[-1] + rest_s(seconds, size * len(arrivals), length),
            chunks,
        )

    async def _decided(self, store: PrefixStore, seconds: Seconds) -> tuple[float, int]:
        """Seconds until everything is there, and the chunks that were fetched."""
        began = time.monotonic()
        chunks = await self._fetch(store, seconds)
        took = time.monotonic() - began
        return took + rest_s(seconds, chunks * store.chunk_tokens, len(self._tokens)), chunks

    async def _fetch(self, store: PrefixStore, seconds: Seconds) -> int:
        wanted = Wanted(self._tokens, store.chain(SHARING), 0, False, "decisions", seconds)
        return len((await store.fetch(wanted)).chunks)

    @asynccontextmanager
    async def _opened(self, store: ByteStore) -> AsyncIterator[tuple[SharedStore, PrefixStore]]:
        stores = await asyncio.to_thread(
            build_stores, self._config, {MODEL: self._layout}, store=store, keyring=self._keyring
        )
        try:
            yield stores, stores.of(MODEL)
        finally:
            await asyncio.to_thread(stores.close)


def _endless(start: int, stop: int) -> float:
    """Computing takes so long that everything is fetched."""
    return FORCED_S * (stop - start)


def _chunk_arrivals(values: list[float], began: float, all_there: float, groups: int) -> list[float]:
    """Seconds after which each chunk was decoded: its last value's arrival, and what followed the last of all."""
    after = all_there - values[-1]
    return [at - began + after for at in values[groups - 1 :: groups]]
