"""A prefix store of a tiny model on a real Redis, and an engine that pretends to compute."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kvstore.base import ByteStore
from kvstore.build import SharedStore, build_stores
from kvstore.keys import Keyring
from kvstore.redis.embedded import EmbeddedServer
from kvstore.redis.nodes import parse_url
from kvstore.redis.redis_store import RedisStore
from kvstore.scripts import SCRIPTS
from kvstore.store import PrefixStore
from kvstore.types import Found, ModelLayout, Offer, Wanted
from turnout.kvstore_config import KVStoreConfig
from turnout.types import SharingPolicy

BLOCK, CHUNK = 4, 8
LAYOUT = ModelLayout({"weights": "w", "tokenizer": "t"}, 3, 2, 4, torch.float32, BLOCK)
ROOT = bytes(range(32))
MODEL = "m"


def tokens(count: int, seed: int = 0) -> list[int]:
    return [(seed * 131 + i * i + 7 * i) % 997 for i in range(count)]


FOUR = tokens(4 * CHUNK + 1)  # four chunks and the token that is always computed


def kv_of(prefix: list[int], layout: ModelLayout = LAYOUT, chunk: int = CHUNK) -> torch.Tensor:
    """What the pretended model computes for the last chunk of these tokens: different for any other prefix."""
    seed = int.from_bytes(hashlib.sha256(repr(prefix).encode()).digest()[:6], "little")
    size = (layout.layers, chunk, 2, layout.kv_heads, layout.head_dim)
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(layout.dtype)


def slow(a: int, b: int) -> float:
    """Computing takes ten seconds a token: fetching is always better, however busy the machine is."""
    return 10.0 * (b - a)


def config(**settings: Any) -> KVStoreConfig:
    defaults = {
        "url": "off", "chunk_tokens": CHUNK, "admission": "always", "host_memory_bytes": 0, "residual_tokens": 0,
        "fetch_timeout_s": 20.0,
    }  # fmt: skip
    return KVStoreConfig(**{**defaults, **settings})


class PeekingStore(RedisStore):
    """A store with its own rights, whose tests look into the server and spoil it with all rights.

    Args:
        server: made with an administrator.
    """

    def __init__(self, server: EmbeddedServer) -> None:
        super().__init__(parse_url(server.url))
        assert server.admin_url is not None
        self._admin = RedisStore(parse_url(server.admin_url))

    def script(self, text: str, keys: Any, args: Any, deadline: float) -> Any:
        if text in SCRIPTS:
            return super().script(text, keys, args, deadline)
        return self._admin.script(text, keys, args, deadline)

    def close(self) -> None:
        super().close()
        self._admin.close()


@contextmanager
def redis_store(server: EmbeddedServer) -> Iterator[RedisStore]:
    """A connection of its own."""
    store = PeekingStore(server)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def shared(
    store: ByteStore | None, keyring: Keyring | None = None, layout: ModelLayout = LAYOUT, **settings: Any
) -> Iterator[SharedStore]:
    """The stores of one process."""
    stores = build_stores(config(**settings), {MODEL: layout}, store=store, keyring=keyring or Keyring(ROOT))
    try:
        yield stores
    finally:
        stores.close()


class Engine:
    """Serves prompts over a store: what is found must be right, what is not is computed and offered."""

    def __init__(
        self,
        stores: SharedStore,
        tenant: str = "alice",
        layout: ModelLayout = LAYOUT,
        told: SharingPolicy | None = None,
    ) -> None:
        self.stores = stores
        self.store: PrefixStore = stores.of(MODEL)
        self.tenant = tenant
        self.layout = layout
        self.told = told
        self.freed = 0
        self.offered = 0

    def wanted(self, prompt: list[int], held: int = 0, lossy: bool = False, seconds: Any = slow) -> Wanted:
        chain = self.store.chain(self.stores.sharing(self.tenant, prompt, self.told))
        return Wanted(prompt, chain, held, lossy, self.tenant, seconds)

    async def find(self, prompt: list[int], **how: Any) -> Found:
        """Look a prompt up, and see that nothing wrong was found."""
        found = await self.store.fetch(self.wanted(prompt, **how))
        for index, kv in enumerate(found.chunks):
            right = kv_of(prompt[: found.start + (index + 1) * CHUNK], self.layout)
            assert torch.equal(kv, right) or (found.lossy and (kv - right).abs().max() < 0.2)
        return found

    def compute(self, prompt: list[int], start: int = 0) -> int:
        """Pretend to compute the full chunks from `start` on, and offer what the store wants; how many it took."""
        chain = self.store.chain(self.stores.sharing(self.tenant, prompt, self.told))
        links = chain.links(prompt, len(prompt) // CHUNK)
        taken = 0
        for link in links[start:]:
            if self.store.wants(link):
                self.offered += 1
                head = prompt[: (link.index + 1) * CHUNK]
                offer = Offer(link, self.tenant, lambda head=head: kv_of(head, self.layout), self._done,
                              tuple(links[: link.index]))  # fmt: skip
                taken += self.store.offer(offer)
        return taken

    async def serve(self, prompt: list[int], **how: Any) -> Found:
        """Find, compute the rest, and wait until it is stored."""
        found = await self.find(prompt, **how)
        self.compute(prompt, len(found.chunks) + found.start // CHUNK)
        assert await self.store.settle()
        return found

    def _done(self) -> None:
        self.freed += 1


def start_server(folder: Path) -> EmbeddedServer:
    return EmbeddedServer(folder, 64 << 20, admin=True)


async def until(condition: Any, within_s: float = 30.0) -> None:
    """Poll until something holds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + within_s
    while not condition():
        assert loop.time() < end, "did not happen in time"
        await asyncio.sleep(0.002)


class Gated:
    """A store whose reads, or whose calls of another kind, wait until a gate opens.

    Args:
        inner: the store behind it.
        name: of the calls.
    """

    def __init__(self, inner: ByteStore, name: str = "read") -> None:
        self._inner = inner
        self._name = name
        self._loop = asyncio.get_running_loop()
        self.gate = asyncio.Event()
        self.waiting = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name != self._name:
            return method

        def wait_first(*args: Any) -> Any:
            self.waiting += 1
            asyncio.run_coroutine_threadsafe(self.gate.wait(), self._loop).result(5.0)
            return method(*args[:-1], soon())

        return wait_first


def gated(store: ByteStore, name: str = "read") -> Any:
    return Gated(store, name)


async def fill(store: ByteStore, prompt: list[int], **settings: Any) -> None:
    """Have another process store the prompt's chunks."""
    with shared(store, **settings) as stores:
        await Engine(stores).serve(prompt)


def soon() -> float:
    return time.monotonic() + 30.0
