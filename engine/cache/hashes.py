"""What a block holds, as a hash: of its tokens, of what lies before it, and of who may find it."""

from __future__ import annotations

import hashlib
from array import array

from decoding.sequence import Sequence
from turnout.types import BlockHash

LOSSY = b"lossy"  # in the hashes of blocks that may hold KV which was not computed exactly


class ContentHashes:
    """Chained hashes of one sequence's full blocks; each is keyed by the namespace of its block, the first one by the
    salt, too.

    Args:
        seq: the sequence.
        size: tokens of a block.
        rope_length: see the attribute.

    Attributes:
        rope_length: the length whose rotary frequencies its keys have (`engine.rope`); 0: the usual ones.
        tainted_from: KV from this token on, the first of a block, may be inexact: no sequence that is exact there
            finds these blocks; None: all of it is exact.
    """

    __slots__ = ("_chain", "_seq", "_size", "rope_length", "tainted_from")

    def __init__(self, seq: Sequence, size: int, rope_length: int = 0) -> None:
        self._seq = seq
        self._size = size
        self._chain: list[BlockHash] = []
        self.rope_length = rope_length
        self.tainted_from: int | None = None

    def first(self, count: int) -> list[BlockHash]:
        """Return hashes of leading full blocks: at least the first `count`, or all if there are fewer."""
        for index in range(len(self._chain), min(count, len(self._seq) // self._size)):
            self._chain.append(self.of(index, self._seq.tokens, self._chain))
        return self._chain

    def of(self, index: int, tokens: list[int], before: list[BlockHash]) -> BlockHash:
        """Of full block `index` of `tokens`, chained to the hash of the block before it."""
        end = (index + 1) * self._size
        content = array("q", tokens[index * self._size : end]).tobytes()
        key = self._seq.sharing.namespace(end).key
        if index:
            key += before[index - 1]
        else:
            key += self._seq.sharing.salt_key
        if self.rope_length:
            key += b"rope %d" % self.rope_length
        if self.tainted_from is not None and end > self.tainted_from:
            key += LOSSY
        return BlockHash(hashlib.blake2b(content, key=hashlib.blake2b(key).digest(), digest_size=16).digest())

    def taint(self, start: int | None) -> None:
        """KV from token `start` on may be inexact; None takes that back, before any such KV was used."""
        self.tainted_from = start
        del self._chain[(start or 0) // self._size :]
