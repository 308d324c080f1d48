"""What tests of byte stores share: poisoned memory to read into, and values to read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.base import ByteStore, StoreFault

LIFE_MS = 60_000


def soon(seconds: float = 30.0) -> float:
    """A deadline."""
    return time.monotonic() + seconds


@dataclass
class Landing:
    """Where values land: memory that was poisoned before."""

    unwanted: frozenset[int] = frozenset()
    stop_after: int | None = None
    rooms: dict[int, bytearray] = field(default_factory=dict)
    complete: list[int] = field(default_factory=list)

    def place(self, index: int, size: int) -> memoryview | None:
        """Room for a value."""
        if index in self.unwanted:
            return None
        self.rooms[index] = bytearray(b"\xaa" * size)
        return memoryview(self.rooms[index])

    def done(self, index: int) -> bool:
        """A value is complete."""
        self.complete.append(index)
        return index != self.stop_after

    def values(self) -> list[bytes]:
        """The complete ones, which came in order."""
        assert self.complete == list(range(len(self.complete)))
        return [bytes(self.rooms[i]) for i in self.complete]


def read(store: ByteStore, keys: list[bytes], deadline: float | None = None) -> list[bytes]:
    """Values from the first on."""
    landing = Landing()
    count = store.read(keys, landing.place, landing.done, LIFE_MS, deadline or soon())
    assert count == len(landing.complete)
    return landing.values()


def fill(store: ByteStore, count: int, size: int = 100) -> tuple[list[bytes], list[bytes]]:
    """Random values under new keys."""
    keys = [b"to1:%s:%d" % (os.urandom(6).hex().encode(), i) for i in range(count)]
    values = [os.urandom(size) for _ in keys]
    for key, value in zip(keys, values, strict=True):
        assert store.write(key, [value], LIFE_MS, soon())
    return keys, values


def kind_of(call: Callable[[], object]) -> str:
    """How a call ends: the kind of its fault, or none."""
    try:
        call()
    except StoreFault as fault:
        return fault.kind
    return "none"
