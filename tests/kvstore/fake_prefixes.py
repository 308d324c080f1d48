"""A prefix store in a dict, as the engine sees one, with what can go wrong with it."""

from __future__ import annotations

import asyncio

import torch

from kvstore.keys import Chain, Keyring, Link
from kvstore.types import Found, Offer, StoreStats, Wanted
from turnout.types import Sharing

ROOT = bytes(range(32))


class FakePrefixes:
    """Serves what lies on its shelf; several share one where their engines are to share.

    Args:
        chunk_tokens: of a chunk.
        shelf: digest -> kv.
        model: stands for the fingerprint.

    Attributes:
        asked: every fetch.
        wanted: digests that `wants` was asked of.
        waiting: offers that are not taken yet, where `takes` is False.
        gate: fetches wait for it.
        error: fetches raise it.
        lossy: whether what it gives lossy requests has lost something: all values are a little larger.
        cheats: whether it gives that to every tenant.
    """

    def __init__(self, chunk_tokens: int, shelf: dict[bytes, torch.Tensor] | None = None, model: str = "m") -> None:
        self.chunk_tokens = chunk_tokens
        self.shelf = shelf if shelf is not None else {}
        self.asked: list[Wanted] = []
        self.wanted: list[bytes] = []
        self.waiting: list[Offer] = []
        self.takes = True
        self.wants_all = True
        self.gate: asyncio.Event | None = None
        self.error: Exception | None = None
        self.lossy = False
        self.cheats = False
        self._keyring = Keyring(ROOT)
        self._fingerprint = model.encode().ljust(32, b"-")

    def chain(self, sharing: Sharing, rope_length: int = 0) -> Chain:
        return Chain(self._keyring, self._fingerprint, self.chunk_tokens, sharing, rope_length)

    async def fetch(self, wanted: Wanted) -> Found:
        self.asked.append(wanted)
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        first = wanted.held // self.chunk_tokens
        links = wanted.chain.links(wanted.tokens, len(wanted.tokens) // self.chunk_tokens)
        chunks: list[torch.Tensor] = []
        for link in links[first:]:
            kv = self.shelf.get(link.digest)
            if kv is None:
                break
            chunks.append(kv)
        lossy = bool(chunks) and (self.cheats or (self.lossy and wanted.lossy))
        chunks = [1.01 * kv for kv in chunks] if lossy else chunks
        return Found(first * self.chunk_tokens, chunks, lossy, ("memory",) * len(chunks))

    def wants(self, link: Link) -> bool:
        self.wanted.append(link.digest)
        return self.wants_all and link.digest not in self.shelf

    def offer(self, offer: Offer) -> bool:
        if not self.takes:
            self.waiting.append(offer)
            return True
        self._take(offer)
        return True

    def take_waiting(self) -> None:
        while self.waiting:
            self._take(self.waiting.pop(0))

    def stats(self) -> StoreStats:
        return StoreStats(lookups=len(self.asked), health="ok")

    async def close(self) -> None:
        for offer in self.waiting:
            offer.done()

    def _take(self, offer: Offer) -> None:
        self.shelf[offer.link.digest] = offer.read()
        offer.done()
