"""A sequence's place in one model's cache: which tokens are covered, in which blocks."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from decoding.sequence import Sequence
from engine.cache.blocks import BlockPool, OutOfBlocksError
from engine.cache.hashes import ContentHashes
from engine.cache.origin import Origin
from engine.cache.paged_kv import PagedKV
from engine.cache.uncommitted import ScratchKV
from turnout.types import BlockHash

if TYPE_CHECKING:
    from engine.reuse.reused_spans import Reused


class BlockTable:
    """Where one sequence's keys and values lie in one model.

    `tokens` are the tokens whose KV the blocks hold: a prefix of the sequence, possibly followed by hypothetical ones
    that `reconcile` drops when the sequence went another way. Token i lies in slot `blocks[i // size] * size + i %
    size` and stands at position `offset` + i; `scratch` lies behind them. Blocks are found by `content`; `origin` is
    what caches outside the pool have to do with it, `reused` what it takes over of KV that stood elsewhere.
    `cached_on_arrival` counts prompt tokens found in the pool, not computed; `arrival` is its place in the order of
    first use; `promised` are the blocks it was admitted for; `gave_way_at` is its length when it last gave its blocks
    up to another tenant.

    Args:
        seq: whose cache this is.
        pool: where blocks come from.
        store: the tensors, for copy-on-write.
    """

    __slots__ = (
        *("_agreed", "_array", "_computed", "_hashes", "arrival", "blocks", "cached_on_arrival", "content"),
        *("gave_way_at", "in_flight", "offset", "origin", "pool", "promised", "released", "reused", "scratch", "seq"),
        *("store", "tokens"),
    )

    def __init__(self, seq: Sequence, pool: BlockPool, store: PagedKV) -> None:
        self.seq = seq
        self.pool = pool
        self.store = store
        self.tokens: list[int] = []
        self.blocks: list[int] = []
        self.scratch, self.offset = ScratchKV(), 0
        self.content = ContentHashes(seq, pool.block_size, pool.rope_length(seq))
        self.origin = Origin()
        self.reused: Reused | None = None
        self.in_flight = self.released = False
        self.cached_on_arrival = self.promised = self.gave_way_at = 0
        self.arrival: int | None = None
        self._agreed = 0
        self._computed = False
        self._hashes: list[BlockHash] = []  # of the full blocks that are cached and agree with the sequence
        self._array: npt.NDArray[np.int32] = np.zeros(16, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def block_array(self) -> npt.NDArray[np.int32]:
        """int32 [len(blocks)], a view valid until the next reservation."""
        return self._array[: len(self.blocks)]

    def lacks_last(self) -> bool:
        """Whether exactly the sequence's last token is not cached, as in every step of a decode loop but its first."""
        length = len(self.tokens)
        return 0 < length == len(self.seq.tokens) - 1 and self._agree() == length

    def _agree(self) -> int:
        """How many cached tokens are the sequence's."""
        mine, theirs, index = self.tokens, self.seq.tokens, self._agreed
        end = min(len(mine), len(theirs))
        while index < end and mine[index] == theirs[index]:
            index += 1
        self._agreed = index
        return index

    def reconcile(self, extra: tuple[int, ...] = (), compute_from: int | None = None) -> int:
        """Keep what agrees with the sequence followed by `extra`; drop the rest.

        Args:
            extra: hypothetical tokens after the sequence.
            compute_from: nothing from this index on may be kept, because its logits are wanted.

        Returns:
            Cached tokens that stay.
        """
        mine, index = self.tokens, self._agree()
        if index == len(self.seq.tokens):
            for token in extra:
                if index >= len(mine) or mine[index] != token:
                    break
                index += 1
        if compute_from is not None:
            index = min(index, compute_from)
        if index < len(mine):
            self.truncate(index)
            if not self._computed:  # found, but computed all the same
                self.cached_on_arrival = min(self.cached_on_arrival, index)
        return index

    def adopt_prefix(self) -> int:
        """On an empty table, share the longest published prefix, always leaving one token to compute.

        Prompt tokens found before anything was computed for this sequence count as `cached_on_arrival`: what a
        preempted sequence finds again is its own.

        Returns:
            Tokens found.
        """
        if self.tokens:
            return 0
        self.truncate(0)  # a failed forward leaves reserved blocks behind
        found = self.match_prefix()
        for block in found:
            self.pool.retain(block)
        self._push_blocks(found)
        self._hashes.extend(self.content.first(len(found))[: len(found)])
        self.tokens.extend(self.seq.tokens[: len(found) * self.pool.block_size])
        self._agreed = len(self.tokens)
        if not self._computed:
            self.cached_on_arrival = min(len(self.tokens), self.seq.num_prompt_tokens)
            self.origin.arrived(self.cached_on_arrival)
        return len(self.tokens)

    def match_prefix(self) -> list[int]:
        """Published blocks of the sequence's longest prefix, one token always left out; takes no reference."""
        found: list[int] = []
        for index in range((len(self.seq) - 1) // self.pool.block_size):
            block = self.pool.find(self.content.first(index + 1)[index])
            if block is None:
                break
            found.append(block)
        return found

    def blocks_needed(self, length: int) -> int:
        """Blocks `reserve(length)` would allocate, copies of shared blocks included."""
        size, start = self.pool.block_size, len(self.tokens)
        needed = max(-(-length // size) - len(self.blocks), 0)
        if start % size and start < length and not self.pool.is_exclusive(self.blocks[start // size]):
            needed += 1
        return needed

    def reserve(self, length: int) -> None:
        """Make room for tokens up to `length`, and make the block being written to exclusive.

        Raises:
            OutOfBlocksError: the pool is exhausted; the table is as before.
        """
        size, start = self.pool.block_size, len(self.tokens)
        partial = start // size
        if start % size and start < length <= len(self.blocks) * size and self.pool.is_exclusive(self.blocks[partial]):
            self.pool.unpublish(self.blocks[partial])  # as in most steps, all goes into the block that is begun
            return
        needed = self.blocks_needed(length)
        if needed > self.pool.num_available:
            raise OutOfBlocksError(f"{needed} blocks wanted, {self.pool.num_available} available")
        if start % size and start < length:
            block = self.blocks[partial]
            if not self.pool.is_exclusive(block):
                needed -= 1
                fresh = self.pool.allocate(1)[0]
                self.store.copy_block(block, fresh, size)
                self.pool.release([block])
                self.blocks[partial] = fresh
                self._array[partial] = fresh
            else:
                self.pool.unpublish(block)
        if needed > 0:
            self._push_blocks(self.pool.allocate(needed, after=self.blocks[-1] if self.blocks else None))

    def _push_blocks(self, blocks: list[int]) -> None:
        start = len(self.blocks)
        self.blocks.extend(blocks)
        while len(self._array) < len(self.blocks):
            self._array = np.concatenate([self._array, np.zeros_like(self._array)])
        self._array[start : len(self.blocks)] = blocks

    def slots(self, start: int, count: int) -> list[int]:
        """Slots of tokens start..start+count-1; room for them must have been reserved."""
        size, blocks = self.pool.block_size, self.blocks
        return [blocks[index // size] * size + index % size for index in range(start, start + count)]

    def filled(self, tokens: list[int]) -> None:
        """KV of these tokens, continuing the cached ones, has been computed."""
        self._computed = True
        self.scratch.forget()
        self.tokens.extend(tokens)
        self._publish_full_blocks()

    def _publish_full_blocks(self) -> None:
        """Make full blocks findable; where the same content is published already, share that block instead.

        So every published block's parents are published blocks too, referenced by every table that references it:
        when all are released, it is evicted before them.
        """
        size = self.pool.block_size
        full = min(len(self.tokens), len(self.seq.tokens)) // size
        for index in range(len(self._hashes), full):
            content = self.content.of(index, self.tokens, self._hashes)
            self._hashes.append(content)
            mine, canonical = self.blocks[index], self.pool.publish(self.blocks[index], content)
            if canonical != mine:
                self.pool.retain(canonical)
                self.pool.release([mine])
                self.blocks[index] = canonical
                self._array[index] = canonical
        if self.origin.watcher is not None:
            self.origin.published(self, len(self._hashes))

    def truncate(self, length: int) -> None:
        """Forget cached tokens from `length` on, and give back blocks that hold none of the rest."""
        size = self.pool.block_size
        self.scratch.forget()
        del self.tokens[length:]
        self._agreed = min(self._agreed, length)
        self.trim(length)
        del self._hashes[length // size :]

    def trim(self, length: int) -> None:
        """Give back blocks that tokens up to `length`, at least the cached ones, do not need."""
        keep = -(-length // self.pool.block_size)
        if keep < len(self.blocks):
            self.pool.release(self.blocks[keep:])
            del self.blocks[keep:]

    def commit_path(self, base: int, nodes: tuple[int, ...], tokens: list[int]) -> None:
        """Keep a path of a verified tree: node i was written at slot base + i, the path becomes contiguous.

        Args:
            base: cached length when the tree was fed.
            nodes: accepted nodes in order.
            tokens: their tokens.
        """
        moved = [(node, place) for place, node in enumerate(nodes) if node != place]
        if moved:
            start = moved[0][1]
            sources = [self.slots(base + node, 1)[0] for node in nodes[start:]]
            self.store.move(sources, self.slots(base + start, len(nodes) - start))
        del self.tokens[base:]
        self._agreed = min(self._agreed, base)
        self.tokens.extend(tokens)
        self.truncate(base + len(nodes))

    def fork(self, seq: Sequence) -> BlockTable:
        """A table for a twin sequence that shares every block until one of the two writes."""
        twin = BlockTable(seq, self.pool, self.store)
        length = min(len(self.tokens), len(seq))
        keep = -(-length // self.pool.block_size)
        for block in self.blocks[:keep]:
            self.pool.retain(block)
        twin._push_blocks(self.blocks[:keep])
        twin.tokens = self.tokens[:length]
        twin._hashes = self._hashes[: length // self.pool.block_size]
        twin.content.tainted_from, twin.origin = self.content.tainted_from, self.origin.forked()
        return twin

    def drop(self) -> None:
        """Give back everything (preemption or release); the sequence can be computed anew at any time."""
        self.truncate(0)
        self.promised = 0
        if self.seq.chain is not None:
            self.seq.chain.past.forget(self.pool.model)


def promised(tables: Collection[BlockTable]) -> int:
    """Blocks that sequences were admitted for and have not taken yet."""
    return sum(max(table.promised - len(table.blocks), 0) for table in tables)
