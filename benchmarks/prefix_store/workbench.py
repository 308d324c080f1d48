"""Equipment of the measurements: an engine, a real Redis, and stores that are put before the engine in turn."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.cache.connector import SharedPrefixes
from engine.costs.forward import attended_positions
from engine.fingerprint import content_digests
from kvstore.build import build_stores
from kvstore.store import StoreStats
from pool.local_pool import LocalPool
from turnout.calls import Chunk, GenerateCall, Usage
from turnout.config import KVStoreConfig, parse_config
from turnout.types import SamplingParams

NAME = "bench"
MEMBER = "large"
KV_MEMORY_BYTES = 512 << 20
FIRST_TOKEN_ID = 4  # below are special ones
SETTLE_S = 60.0


@dataclass(frozen=True, slots=True)
class Answered:
    """Arrival of the first token of a request.

    Attributes:
        seconds: until it was there.
        computed: prompt tokens that were computed.
        cached: prompt tokens found in the engine's own blocks, those that the store put there included.
        fetched: of these, what the store put there for this request.
    """

    seconds: float
    computed: int
    cached: int
    fetched: int


class Workbench:
    """One engine with several stores; the one it uses is set for each measurement.

    Args:
        checkpoint: the model's folder.
        key: file with the root key.
        threads: of the engine; None: all cores.
    """

    def __init__(self, checkpoint: Path, key: Path, threads: int | None = None) -> None:
        config = parse_config(
            {
                "models": {MEMBER: {"path": str(checkpoint), "dtype": "bfloat16", "kv_memory_bytes": KV_MEMORY_BYTES}},
                "pools": {NAME: {"small": MEMBER, "large": MEMBER}},
                "engine": {"threads": threads},
                "kvstore": {"url": "off"},
            }
        )
        self.pool = LocalPool.load(NAME, config)
        self.engine = self.pool.engines[MEMBER]
        self.layout = self.engine.layout(content_digests(checkpoint, checkpoint))
        self._key = key
        self._ids = itertools.count()

    def seconds(self, start: int, stop: int) -> float:
        """Forecast of the idle engine: to compute tokens `start` to `stop` - 1 after those before them."""
        fed = stop - start
        return self.engine.step_time.seconds(fed, attended_positions(start, fed), 1)

    def profiled(self, profiles: Mapping[str, Any]) -> None:
        """Let codecs know of the model."""
        self.layout = replace(self.layout, profiles=profiles)

    def tokens(self, draw: random.Random, count: int) -> list[int]:
        """Random token ids."""
        return [draw.randrange(FIRST_TOKEN_ID, self.engine.vocab_size) for _ in range(count)]

    @asynccontextmanager
    async def store(self, url: str, **settings: Any) -> AsyncIterator[SharedPrefixes]:
        """A store opened as in a process of its own: connections, estimates and memory are new.

        Args:
            url: of the server.
            **settings: of `KVStoreConfig`; host memory is off unless they say otherwise.
        """
        wanted = {"host_memory_bytes": 0, "write_queue": 4096, **settings}
        config = KVStoreConfig(url=url, root_key_file=str(self._key), **wanted)
        stores = await asyncio.to_thread(build_stores, config, {MEMBER: self.layout})
        before = self.engine.shared
        self.engine.share(stores.of(MEMBER))
        bridge, self.engine.shared = self.engine.shared, before
        assert bridge is not None
        try:
            yield bridge
        finally:
            if self.engine.shared is bridge:
                self.engine.shared = None
            await bridge.close()
            await asyncio.to_thread(stores.close)

    async def first_token(
        self, bridge: SharedPrefixes | None, prompt: list[int], *, lossy: bool = False, fresh: bool = True
    ) -> Answered:
        """Ask for one token.

        Args:
            bridge: the store to use; None: none.
            prompt: token ids.
            lossy: whether what lossy codecs made may be used.
            fresh: forget what the engine's own blocks hold before.
        """
        self.engine.shared = bridge
        if fresh:
            self.engine.pool.clear_cached()
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        call = GenerateCall(
            f"{NAME}-{next(self._ids)}",
            NAME,
            sampling,
            tuple(prompt),
            method="plain",
            cache="lossy" if lossy else "exact",
        )
        seconds = 0.0
        usage: Usage | None = None
        began = time.perf_counter()
        async with aclosing(self.pool.generate(call)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, Chunk) and event.tokens and not seconds:
                    seconds = time.perf_counter() - began
                elif isinstance(event, Usage):
                    usage = event
        assert usage is not None
        work = usage.models[MEMBER]
        return Answered(seconds, work.prompt_tokens, work.cached_tokens, work.fetched_tokens)

    async def fill(self, url: str, prompt: list[int], codec: str = "raw") -> StoreStats:
        """Compute a prompt and have all of it written.

        Raises:
            RuntimeError: some of it was not.
        """
        async with self.store(url, codecs=(codec,), admission="always") as bridge:
            await self.first_token(bridge, prompt)
            await settled(bridge)
            stats = bridge.store.stats()
            chunks = len(prompt) // bridge.store.chunk_tokens
            if stats.dropped or stats.writes < chunks:
                raise RuntimeError(f"{codec}: {stats.writes} of {chunks} chunks written, dropped {stats.dropped}")
        self.engine.pool.clear_cached()
        return stats

    async def close(self) -> None:
        """End the engine."""
        await self.pool.close()


async def settled(bridge: SharedPrefixes) -> None:
    """Wait until everything that was offered is written, and the engine keeps no block for that.

    Raises:
        TimeoutError: it takes too long.
    """
    if not await bridge.store.settle(SETTLE_S):
        raise TimeoutError(f"the store had not written everything after {SETTLE_S:g} s")
    async with asyncio.timeout(SETTLE_S):
        while bridge.kept:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.001)
