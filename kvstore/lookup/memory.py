"""The host tier: chunks in this process's memory, the least recently used given up first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

import torch

EXACT = "exact"  # the quality of what came through no lossy codec

Key = tuple[bytes, str]


class HostMemory:
    """Chunks by (digest, quality), within a number of bytes. Any thread may call.

    A chain is used tail first, so that a chunk outlives its continuations: those are of no use without it.

    Args:
        max_bytes: most that is held; 0 holds nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held: OrderedDict[Key, torch.Tensor] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()
        self.evicted = 0

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._held)

    def get(self, digests: Sequence[bytes], qualities: Sequence[str]) -> list[tuple[torch.Tensor, str] | None]:
        """Each digest's chunk and its quality, the first of `qualities` that is held; None where there is none."""
        with self._lock:
            found: list[tuple[torch.Tensor, str] | None] = []
            for digest in digests:
                quality = next((each for each in qualities if (digest, each) in self._held), None)
                found.append(None if quality is None else (self._held[digest, quality], quality))
            for digest, hit in zip(reversed(digests), reversed(found), strict=True):
                if hit is not None:
                    self._held.move_to_end((digest, hit[1]))
            return found

    def has(self, digest: bytes, quality: str = EXACT) -> bool:
        """Whether the chunk is held; does not count as a use."""
        return (digest, quality) in self._held

    def put(self, digest: bytes, kv: torch.Tensor, quality: str = EXACT, before: Sequence[bytes] = ()) -> None:
        """Hold a chunk.

        Args:
            digest: of the chunk.
            kv: [layers, tokens, 2, kv_heads, head_dim], whose memory is nobody else's to write to.
            quality: `EXACT`, or the name of the lossy codec that it came through.
            before: digests of its ancestors, first to last: they count as used after it.
        """
        size = kv.numel() * kv.element_size()
        if size > self.max_bytes:
            return
        with self._lock:
            old = self._held.pop((digest, quality), None)
            if old is not None:
                self._bytes -= old.numel() * old.element_size()
            self._held[digest, quality] = kv
            self._bytes += size
            for ancestor in reversed(before):
                if (ancestor, quality) in self._held:
                    self._held.move_to_end((ancestor, quality))
            while self._bytes > self.max_bytes:
                _, dropped = self._held.popitem(last=False)
                self._bytes -= dropped.numel() * dropped.element_size()
                self.evicted += 1

    def clear(self) -> None:
        """Hold nothing any more."""
        with self._lock:
            self._held.clear()
            self._bytes = 0
