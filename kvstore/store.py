"""The prefix store of one model, as the engine sees it. Whatever goes wrong in it is a miss."""

from __future__ import annotations

import asyncio
import logging

from kvstore.encodings import Encodings
from kvstore.keys import Chain, Link
from kvstore.lookup.admission import Doorkeeper
from kvstore.lookup.controller import Controller
from kvstore.lookup.fetcher import Fetcher
from kvstore.lookup.memory import HostMemory
from kvstore.lookup.writer import RemoteTier, Writer
from kvstore.types import Counts, Found, Health, ModelLayout, Offer, StoreStats, TenantCounts, Wanted
from turnout.types import Sharing

__all__ = ["Found", "ModelLayout", "Offer", "PrefixStore", "StoreStats", "TenantCounts", "Wanted"]

log = logging.getLogger(__name__)


class PrefixStore:
    """Chunks of one model: in this process's memory, and in Redis where there is one.

    Made by `kvstore.build.build_stores`; `fetch` belongs to an event loop, the rest may be called from any thread.

    Args:
        name: of the model, for the log.
        encodings: how its chunks are kept.
        fetcher: finds them.
        writer: stores them.
        doorkeeper: says which are worth it.
        counts: of this model.
        controller: of the link.
        memory: the host tier.
        remote: Redis; None: there is none.
    """

    def __init__(
        self,
        name: str,
        encodings: Encodings,
        fetcher: Fetcher,
        writer: Writer,
        doorkeeper: Doorkeeper,
        counts: Counts,
        controller: Controller,
        memory: HostMemory,
        remote: RemoteTier | None,
    ) -> None:
        self.name = name
        self.encodings = encodings
        self.counts = counts
        self.controller = controller
        self.drift = 0.0
        self.servers: tuple[str, ...] = ()
        self.fetcher = fetcher
        self._writer = writer
        self._doorkeeper = doorkeeper
        self.memory = memory
        self._remote = remote
        self._closed = False

    @property
    def chunk_tokens(self) -> int:
        """Tokens in a chunk: a multiple of the engine's block."""
        return self.encodings.chunk_tokens

    def chain(self, sharing: Sharing, rope_length: int = 0) -> Chain:
        """Begin the digests of a sequence; see `kvstore.keys.Chain`."""
        return self.encodings.chain(sharing, rope_length)

    async def fetch(self, wanted: Wanted) -> Found:
        """Find chunks that continue what is held; none on any fault, and within the configured time.

        Chunks of which no block could be used are not looked for: the last token is always computed.

        Raises:
            asyncio.CancelledError: and nothing else.
        """
        size, block = self.chunk_tokens, self.encodings.layout.block_size
        nothing = Found(wanted.held // size * size, [])
        if self._closed:
            return nothing
        try:
            count = max(0, (len(wanted.tokens) - 1 - block) // size + 1)
            count = min(count, len(wanted.tokens) // size)
            links = wanted.chain.links(wanted.tokens, count)[:count]
            self._doorkeeper.sight(links)
            links = links[wanted.held // size :]
            found = await self.fetcher.look_up(wanted, links, size) if links else nothing
            self.counts.looked_up(wanted.tenant, len(links), found.tiers, size)
            self._writer.use(self.encodings, self.counts, links[: len(found.tiers)])
        except Exception:
            self.counts.fault("internal")
            log.exception("%s: looking up a prefix failed", self.name)
            return nothing
        return found

    def wants(self, link: Link) -> bool:
        """Tell whether to offer a chunk that was computed, or was found in the engine's own pool.

        Does no I/O.
        """
        if self._closed or not (self._remote is not None or self.memory.max_bytes):
            return False
        return self._doorkeeper.wants(link)

    def offer(self, offer: Offer) -> bool:
        """Have a chunk stored, later and elsewhere; False, and `done` called, where that cannot be."""
        if self._closed:
            self.counts.drop("closed")
            offer.done()
            return False
        return self._writer.offer(self.encodings, self.counts, offer)

    def health(self) -> Health:
        """Return the health of Redis: ok, degraded (some breaker is open) or off (none, or none that answers)."""
        return "off" if self._remote is None else self._remote.store.health()

    def stats(self) -> StoreStats:
        """Return the counters."""
        counts = self.counts
        return StoreStats(
            lookups=counts.lookups,
            hits=dict(counts.hits),
            tokens=dict(counts.tokens),
            faults=dict(counts.faults),
            dropped=dict(counts.dropped),
            writes=counts.writes,
            bytes_read=counts.bytes_read,
            bytes_written=counts.bytes_written,
            memory_bytes=self.memory.num_bytes,
            regret_s=counts.regret_s,
            waits_s=counts.waits_s,
            drift=self.drift,
            health=self.health(),
            servers=self.servers,
            tenants=counts.tenants(),
        )

    async def settle(self, timeout_s: float = 5.0) -> bool:
        """Wait until what was offered is stored or dropped; False when that takes longer."""
        return await asyncio.to_thread(self._writer.settle, timeout_s)

    async def close(self) -> None:
        """End all look-ups and offers; what was offered is still stored."""
        self._closed = True
        await self.settle(1.0)
