"""The block pool: reference counts, the prefix table, and eviction. Knows nothing of tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache

from decoding.sequence import Sequence
from turnout.types import BlockHash


class OutOfBlocksError(Exception):
    """The pool has fewer free and evictable blocks than were asked for; nothing was allocated."""


class BlockPool:
    """Fixed-size blocks, identified by number.

    A block is free, held (reference count above 0), or cached: released by everyone, but still findable by the
    hash of its content until its space is needed. Cached blocks are evicted least recently released first;
    a sequence releases its last block first, so a prefix outlives its continuations.

    Args:
        num_blocks: size of the pool.
        block_size: tokens a block holds.
        rope_length: of the greatest length of a sequence: a number that its keys depend on besides the tokens, so that
            only sequences with the same number share blocks; see `engine.rope`. None: always 0.

    Attributes:
        model: digest of the model whose cache it is; set by its owner, as is
        num_layers: of the model.
    """

    model = ""
    num_layers = 0

    def __init__(self, num_blocks: int, block_size: int, rope_length: Callable[[int], int] | None = None) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError("a pool needs at least one block of at least one token")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_slots = num_blocks * block_size
        self._rope_length = rope_length
        self._refs = [0] * num_blocks
        self._hash_of: dict[int, BlockHash] = {}
        self._by_hash: dict[BlockHash, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in _spread(num_blocks))

    def rope_length(self, seq: Sequence) -> int:
        """The number for a sequence, by the greatest length that it can reach."""
        return self.rope_length_of(seq.greatest_length)

    def rope_length_of(self, longest: int) -> int:
        """The number for a greatest length."""
        return 0 if self._rope_length is None else self._rope_length(longest)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - self.num_available

    @property
    def num_cached(self) -> int:
        """Blocks without a reference that can still be found by content."""
        return len(self._cached)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` blocks, each following the one before it where possible (contiguous runs need no gather).

        Args:
            count: how many.
            after: the block these continue.

        Raises:
            OutOfBlocksError: fewer than `count` are available.
        """
        if count > self.num_available:
            raise OutOfBlocksError(f"{count} blocks wanted, {self.num_available} of {self.num_blocks} available")
        taken: list[int] = []
        for _ in range(count):
            block = self._take(after)
            self._refs[block] = 1
            taken.append(block)
            after = block
        return taken

    def _take(self, after: int | None) -> int:
        if after is not None and after + 1 in self._free:
            del self._free[after + 1]
            return after + 1
        if self._free:
            return self._free.popitem(last=False)[0]
        block = self._cached.popitem(last=False)[0]
        self._forget_hash(block)
        return block

    def retain(self, block: int) -> None:
        """Refer to a held or cached block once more."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Give up one reference to each of a sequence's blocks (given in sequence order)."""
        for block in reversed(blocks):
            if self._refs[block] < 1:
                raise RuntimeError(f"block {block} released more often than it was taken")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                target = self._cached if block in self._hash_of else self._free
                target[block] = None

    def is_exclusive(self, block: int) -> bool:
        """Whether only one holder refers to it, so that its content may change."""
        return self._refs[block] == 1

    def is_cached(self, block: int) -> bool:
        """Return whether a block has no reference and can still be found by content."""
        return block in self._cached

    def publish(self, block: int, content: BlockHash) -> int:
        """Make a full block findable.

        Returns:
            The block that is found under this hash: the first that was published.
        """
        if block not in self._hash_of:
            if content in self._by_hash:
                return self._by_hash[content]
            self._by_hash[content] = block
            self._hash_of[block] = content
        return block

    def unpublish(self, block: int) -> None:
        """The block's content is about to change: it must no longer be found."""
        self._forget_hash(block)

    def _forget_hash(self, block: int) -> None:
        content = self._hash_of.pop(block, None)
        if content is not None:
            del self._by_hash[content]

    def find(self, content: BlockHash) -> int | None:
        """The block published under this hash."""
        return self._by_hash.get(content)

    def clear_cached(self) -> None:
        """Drop every cached block (held ones stay)."""
        while self._cached:
            block = self._cached.popitem(last=False)[0]
            self._forget_hash(block)
            self._free[block] = None

    def check_integrity(self) -> None:
        """Every block is in exactly one state, and the two hash tables mirror each other.

        Raises:
            AssertionError: a block leaked or is counted twice.
        """
        held = {block for block, refs in enumerate(self._refs) if refs > 0}
        assert not held & (self._free.keys() | self._cached.keys()), "a held block is also available"
        assert not self._free.keys() & self._cached.keys(), "a block is both free and cached"
        assert len(held) + len(self._free) + len(self._cached) == self.num_blocks, "a block is lost"
        assert {block: content for content, block in self._by_hash.items()} == self._hash_of, "hash tables differ"
        assert self._cached.keys() <= self._hash_of.keys(), "a cached block cannot be found"


@lru_cache(maxsize=8)  # a model's times are measured on two dozen pools of one size before it is served
def _spread(count: int) -> tuple[int, ...]:
    """0..count-1 in bit-reversed order: sequences start far apart, so each can grow contiguously."""
    bits = max(count - 1, 1).bit_length()
    order = (int(format(i, f"0{bits}b")[::-1], 2) for i in range(1 << bits))
    return tuple(block for block in order if block < count)
