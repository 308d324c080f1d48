"""The bridge between a model's block pool and the store that processes share.

Before a sequence's first operation, chunks of its prefix that the store has are written into free blocks of the pool
and published there; the ordinary look-up then finds them. What is evicted before that, came too late or was not there
is computed: the pool can be short, never wrong. Full chunks that were computed exactly are offered to the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import torch

from engine.cache.blocks import BlockPool
from engine.cache.paged_kv import PagedKV
from engine.cache.table import BlockTable, promised
from engine.device import Device, to_its_end
from kvstore.types import Found, Offer, Wanted
from turnout.calls import CacheStats
from turnout.errors import Code, TurnoutError

if TYPE_CHECKING:
    from kvstore.keys import Chain, Link
    from kvstore.store import PrefixStore

log = logging.getLogger(__name__)

Seconds = Callable[[int, int], float]


class SharedPrefixes:
    """Fills one model's pool from its store before sequences start, and offers the store what was computed.

    All of it runs in the event loop; only copies run elsewhere.

    Args:
        store: the model's.
        pool: its blocks.
        kv: its tensors.
        device: where these are.
        tables: the caches of the sequences the model works on.
        seconds: makes a forecast: (a, b) -> seconds to compute tokens a to b - 1 under the present load.
        step: most tokens of a forward.

    Raises:
        ValueError: the store's chunks are not made of whole blocks.

    Attributes:
        tokens: tokens that sequences found when they came, by where: "device" (the pool), "memory", "redis".
        faults: fetches and offers that ended in an unexpected error.
        kept: blocks kept for the store to read: at most an eighth of the pool, or one chunk.
    """

    def __init__(
        self,
        store: PrefixStore,
        pool: BlockPool,
        kv: PagedKV,
        device: Device,
        tables: Callable[[], Collection[BlockTable]],
        seconds: Callable[[], Seconds],
        step: int,
    ) -> None:
        if store.chunk_tokens % pool.block_size:
            raise ValueError(f"chunks of {store.chunk_tokens} tokens are not made of blocks of {pool.block_size}")
        self.store = store
        self.tokens: Counter[str] = Counter()
        self.faults = 0
        self.kept = 0
        self._pool = pool
        self._kv = kv
        self._device = device
        self._tables = tables
        self._seconds, self._step = seconds, step
        self._per_chunk = store.chunk_tokens // pool.block_size
        most = pool.num_blocks // 8
        self._most_kept = most if most >= self._per_chunk else min(self._per_chunk, pool.num_blocks // 2)
        self._fetching: dict[BlockTable, asyncio.Task[None]] = {}
        self._chains: dict[BlockTable, Chain] = {}
        self._closed = False

    async def seek(self, table: BlockTable) -> None:
        """Bring what the store has of a sequence's prefix into the pool; who asks meanwhile waits for the same.

        Ends in bounded time and raises nothing of the store's; leaving early leaves the fetch to the others.

        Raises:
            TurnoutError: CANCELLED, the sequence was released meanwhile.
        """
        task = self._fetching.get(table)
        if task is None:
            held = len(table.match_prefix())
            if self._is_enough(table, held):
                self._settle(table, held)
                return
            task = asyncio.get_running_loop().create_task(self._seek(table, held), name="shared-prefix")
            self._fetching[table] = task
            task.add_done_callback(lambda _: self._fetching.pop(table, None))
        await asyncio.wait([task])
        if table.released or self._closed:
            raise TurnoutError(Code.CANCELLED, "the sequence was released while its prefix was fetched")

    def release(self, table: BlockTable) -> None:
        """The sequence is done with, whatever was being fetched for it."""
        table.origin.watcher = None  # a forward in progress may complete another chunk
        self._chains.pop(table, None)
        task = self._fetching.get(table)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Cancel fetches. The store is closed by who made it."""
        self._closed = True
        tasks = list(self._fetching.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_enough(self, table: BlockTable, held: int) -> bool:
        """Whether no chunk of the store could add to the blocks that are held; one token is always computed."""
        useful = (len(table.seq) - 1) // self._pool.block_size
        chunks = min(-(-useful // self._per_chunk), len(table.seq) // self.store.chunk_tokens)
        return bool(table.tokens) or min(useful, chunks * self._per_chunk) <= held

    def _settle(self, table: BlockTable, held: int) -> None:
        """The table is as full as it gets without computing; from now on its chunks are watched."""
        origin = table.origin
        origin.sought = True
        self.tokens["device"] += min(held * self._pool.block_size, table.seq.num_prompt_tokens)
        if table.content.tainted_from is None and not table.released:
            origin.watcher, origin.watch_at = self._completed, self._per_chunk

    async def _seek(self, table: BlockTable, held: int) -> None:
        try:
            held = self._held_lossy(table, held) if table.seq.lossy else held
            if not self._is_enough(table, held) and self._pool.num_available > promised(self._tables()):
                wanted = Wanted(
                    tokens=list(table.seq.tokens),
                    chain=self._chain(table),
                    held=held * self._pool.block_size,
                    lossy=table.seq.lossy,
                    tenant=table.seq.tenant,
                    seconds=self._seconds(),
                    step=self._step,
                )
                found = await self.store.fetch(wanted)
                if found.chunks and not table.released:
                    await self._enter(table, found)
        except Exception:
            # Whatever is wrong with the store or what it gave: the prefix is computed.
            log.exception("fetching a prefix failed")
            self.faults += 1
        finally:
            self._settle(table, held)

    def _held_lossy(self, table: BlockTable, held: int) -> int:
        """Blocks in the pool if KV behind the exact ones may be inexact; the table is tainted where that adds any."""
        if table.content.tainted_from is not None:
            return held
        table.content.taint(held * self._pool.block_size)
        found = len(table.match_prefix())
        if found <= held:
            table.content.taint(None)
        return found

    async def _enter(self, table: BlockTable, found: Found) -> None:
        """Write chunks into unreferenced blocks, and publish them as the sequence's own."""
        size, pool, seq = self._pool.block_size, self._pool, table.seq
        if found.lossy and not seq.lossy:
            raise ValueError("the store gave inexact values to an exact request")
        before = table.match_prefix()
        first, end = found.start // size, found.start // size + len(found.chunks) * self._per_chunk
        end = min(end, (len(seq) - 1) // size)
        if first > len(before):
            return  # what came before it was evicted meanwhile
        for block in before:  # making room must not cost the prefix itself
            pool.retain(block)
        fresh: list[int] = []
        try:
            count = min(end - len(before), pool.num_available - promised(self._tables()))
            if count < 1:
                return
            fresh = pool.allocate(count, after=before[-1] if before else None)
            await self._run(partial(self._write, found, len(before) - first, fresh))
            if table.released:
                return
            if found.lossy and table.content.tainted_from is None:
                table.content.taint(len(before) * size)
            self._publish(table, len(before), fresh)
            table.origin.fetched = range(len(before) * size, (len(before) + count) * size)
            self.tokens.update(_by_tier(table.origin.fetched, found, self.store.chunk_tokens))
        finally:
            pool.release([*before, *fresh])
            self._device.notify()

    def _publish(self, table: BlockTable, start: int, blocks: list[int]) -> None:
        hashes = table.content.first(start + len(blocks))
        for index, block in enumerate(blocks, start):
            self._pool.publish(block, hashes[index])

    def _write(self, found: Found, skipped: int, blocks: list[int]) -> None:
        """Fill blocks with what was found, its first `skipped` blocks left out."""
        size, at = self._pool.block_size, 0
        for index, chunk in enumerate(found.chunks):
            start = max(skipped - index * self._per_chunk, 0)
            count = min(self._per_chunk - start, len(blocks) - at)
            if count > 0:
                _check(chunk, self._kv, self.store.chunk_tokens)
                self._kv.write_blocks(blocks[at : at + count], size, chunk[:, start * size : (start + count) * size])
                at += count

    async def _run(self, copy: Callable[[], None]) -> None:
        """Copy during forwards on a CPU, between them on a GPU; a cancellation waits until the copy has ended."""
        if self._device.torch_device.type == "cpu":
            await to_its_end(asyncio.ensure_future(asyncio.to_thread(copy)))
            return
        async with self._device.quiet():
            await to_its_end(self._device.run(copy))

    def _chain(self, table: BlockTable) -> Chain:
        chain = self._chains.get(table)
        if chain is None:
            chain = self._chains[table] = self.store.chain(table.seq.sharing, table.content.rope_length)
        return chain

    def _completed(self, table: BlockTable, published: int) -> None:
        """More of its chunks are full and published."""
        origin, per_chunk = table.origin, self._per_chunk
        chunks = range(origin.watch_at // per_chunk - 1, published // per_chunk)
        origin.watch_at = (chunks.stop + 1) * per_chunk
        try:
            self._offer_wanted(table, chunks)
        except Exception:
            # A step of everybody's ends here: it must not fail for this.
            log.exception("offering to the prefix store failed")
            self.faults += 1

    def _offer_wanted(self, table: BlockTable, chunks: range) -> None:
        """Offer those of a table's full chunks that the store wants, as far as the pool can spare their blocks."""
        per_chunk = self._per_chunk
        links = self._chain(table).links(table.tokens, chunks.stop)
        fetched = table.origin.fetched
        wanted = [
            links[index] for index in chunks if not self._came_whole(fetched, index) and self.store.wants(links[index])
        ]
        room = self._most_kept - self.kept
        if wanted and room >= per_chunk:
            self._offer(table, wanted[: room // per_chunk], links)

    def _came_whole(self, fetched: range, index: int) -> bool:
        """Whether the store itself had the chunk."""
        start = index * self.store.chunk_tokens
        return fetched.start <= start and start + self.store.chunk_tokens <= fetched.stop

    def _offer(self, table: BlockTable, wanted: list[Link], links: list[Link]) -> None:
        size, per_chunk = self._pool.block_size, self._per_chunk
        chunks = [table.blocks[link.index * per_chunk : (link.index + 1) * per_chunk] for link in wanted]
        keep = _Kept(asyncio.get_running_loop(), self, [block for chunk in chunks for block in chunk], len(chunks))
        for link, blocks in zip(wanted, chunks, strict=True):
            read = partial(self._read, blocks, size)
            self.store.offer(Offer(link, table.seq.owner, read, keep.one_done, tuple(links[: link.index])))

    def _read(self, blocks: list[int], size: int) -> torch.Tensor:
        """A chunk's keys and values; runs in a thread of the store's."""
        if self._device.torch_device.type == "cpu":
            return self._kv.read_blocks(blocks, size)
        return self._device.call(partial(self._kv.read_blocks, blocks, size))

    def keep(self, blocks: list[int]) -> None:
        """Refer to blocks until the store has read them."""
        for block in blocks:
            self._pool.retain(block)
        self.kept += len(blocks)

    def let_go(self, blocks: list[int]) -> None:
        """The store has read them, or does not want them."""
        self._pool.release(blocks)
        self.kept -= len(blocks)
        self._device.notify()


def stats_of(bridge: SharedPrefixes) -> CacheStats:
    """What one model's store did."""
    store = bridge.store.stats()
    return CacheStats(
        health=store.health,
        lookups=store.lookups,
        tokens=dict(bridge.tokens),
        faults={**store.faults, **({"internal": bridge.faults} if bridge.faults else {})},
        dropped=dict(store.dropped),
        writes=store.writes,
        bytes_read=store.bytes_read,
        bytes_written=store.bytes_written,
        memory_bytes=store.memory_bytes,
        regret_s=store.regret_s,
        servers=store.servers,
    )


def _by_tier(fetched: range, found: Found, chunk_tokens: int) -> Counter[str]:
    """Fetched tokens by where they were."""
    tokens: Counter[str] = Counter()
    for index, tier in enumerate(found.tiers):
        start = found.start + index * chunk_tokens
        stop = start + chunk_tokens
        tokens[tier] += max(min(stop, fetched.stop) - max(start, fetched.start), 0)
    return tokens


def _check(chunk: torch.Tensor, kv: PagedKV, tokens: int) -> None:
    """Raises ValueError: the chunk is not one of this model."""
    expected = (len(kv.layers), tokens, 2, kv.kv_heads, kv.head_dim)
    if chunk.shape != expected or chunk.dtype != kv.dtype:
        raise ValueError(f"a chunk is {chunk.dtype} {list(chunk.shape)}, not {kv.dtype} {list(expected)}")


class _Kept:
    """Blocks of chunks offered together: kept until the last is done with, so that the deepest is evicted first."""

    def __init__(self, loop: asyncio.AbstractEventLoop, owner: SharedPrefixes, blocks: list[int], chunks: int) -> None:
        self._loop = loop
        self._owner = owner
        self._blocks = blocks
        self._left = chunks
        owner.keep(blocks)

    def one_done(self) -> None:
        """Called from any thread, once for each chunk."""
        with suppress(RuntimeError):  # the loop is closed, and the pool gone with it
            self._loop.call_soon_threadsafe(self._count)

    def _count(self) -> None:
        self._left -= 1
        if not self._left:
            self._owner.let_go(self._blocks)
