"""The host tier: chunks in this process's memory; the namespace that holds the most is evicted first, by LRU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

import torch

from kvstore.keys import Link
from turnout.types import Namespace

EXACT = "exact"  # the quality of what came through no lossy codec

Key = tuple[bytes, str]


class HostMemory:
    """Chunks by link and quality, within a number of bytes. Any thread may call.

    What is full is taken from the namespace that holds the most, so that no tenant pushes out all others'. A chain is
    used tail first, so that a chunk outlives its continuations: those are of no use without it.

    Args:
        max_bytes: most that is held; 0 holds nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held: dict[Namespace, OrderedDict[Key, torch.Tensor]] = {}
        self._bytes_of: dict[Namespace, int] = {}
        self._bytes = 0
        self._lock = Lock()
        self.evicted = 0

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return self._bytes

    def __len__(self) -> int:
        return sum(map(len, list(self._held.values())))

    def get(self, links: Sequence[Link], qualities: Sequence[str]) -> list[tuple[torch.Tensor, str] | None]:
        """Return each link's chunk and its quality, the first of `qualities` that is held; None where there is none."""
        with self._lock:
            found: list[tuple[torch.Tensor, str] | None] = []
            for link in links:
                quality = next((each for each in qualities if self._is_held(link, each)), None)
                found.append(None if quality is None else (self._held[link.namespace][link.digest, quality], quality))
            for link, hit in zip(reversed(links), reversed(found), strict=True):
                if hit is not None:
                    self._held[link.namespace].move_to_end((link.digest, hit[1]))
            return found

    def has(self, link: Link, quality: str = EXACT) -> bool:
        """Tell whether the chunk is held; does not count as a use."""
        with self._lock:
            return self._is_held(link, quality)

    def put(self, link: Link, kv: torch.Tensor, quality: str = EXACT, before: Sequence[Link] = ()) -> None:
        """Hold a chunk.

        Args:
            link: of the chunk.
            kv: [layers, tokens, 2, kv_heads, head_dim], whose memory is not written to any more.
            quality: `EXACT`, or the name of the lossy codec that it came through.
            before: its ancestors, first to last: they count as used after it.
        """
        size, owner, key = _size(kv), link.namespace, (link.digest, quality)
        if size > self.max_bytes:
            return
        with self._lock:
            if self._is_held(link, quality):
                self._drop(owner, key)
            self._held.setdefault(owner, OrderedDict())[key] = kv
            self._bytes_of[owner] = self._bytes_of.get(owner, 0) + size
            self._bytes += size
            for ancestor in reversed(before):
                if self._is_held(ancestor, quality):
                    self._held[ancestor.namespace].move_to_end((ancestor.digest, quality))
            while self._bytes > self.max_bytes:
                most = max(self._bytes_of, key=self._bytes_of.__getitem__)
                self._drop(most, next(iter(self._held[most])))
                self.evicted += 1

    def clear(self) -> None:
        """Hold nothing any more."""
        with self._lock:
            self._held.clear()
            self._bytes_of.clear()
            self._bytes = 0

    def _is_held(self, link: Link, quality: str) -> bool:
        return (link.digest, quality) in self._held.get(link.namespace, ())

    def _drop(self, owner: Namespace, key: Key) -> None:
        held = self._held[owner]
        size = _size(held.pop(key))
        self._bytes -= size
        self._bytes_of[owner] -= size
        if not held:
            del self._held[owner], self._bytes_of[owner]


def _size(kv: torch.Tensor) -> int:
    return kv.numel() * kv.element_size()
