"""Single flight inside a process: two requests that want the same chunk share one read of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock
from typing import Literal

import torch

State = Literal["pending", "done", "missing", "left"]


class Wake:
    """Wake-up of a coroutine from any thread.

    Made in the coroutine's event loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def __call__(self) -> None:
        """Wake it, or let its next wait return at once."""
        with suppress(RuntimeError):  # the loop has ended, and with it the wait
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout_s: float) -> bool:
        """Wait until woken; False when that did not happen in time."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), max(timeout_s, 0.0))
        woken = self._event.is_set()
        self._event.clear()
        return woken


class Slot:
    """One chunk that is being read. Settled once; what comes later is ignored.

    Attributes:
        state: pending; done: `kv` is there; missing: the store does not have it, or not in order; left: the
            reader gave up, which says nothing about the chunk.
        kv: [layers, tokens, 2, kv_heads, head_dim] once done.
        quality: what it came through, once done.
    """

    __slots__ = ("_lock", "_watchers", "kv", "quality", "state")

    def __init__(self) -> None:
        self.state: State = "pending"
        self.kv: torch.Tensor | None = None
        self.quality = ""
        self._watchers: list[Callable[[], None]] = []
        self._lock = Lock()

    def watch(self, wake: Callable[[], None]) -> None:
        """Have `wake` called when this is settled: at once if it is."""
        with self._lock:
            if self.state == "pending":
                self._watchers.append(wake)
                return
        wake()

    def settle(self, state: State, kv: torch.Tensor | None = None, quality: str = "") -> bool:
        """Say what became of it; False if that was said before."""
        with self._lock:
            if self.state != "pending":
                return False
            self.kv, self.quality, self.state = kv, quality, state
            watchers, self._watchers = self._watchers, []
        for wake in watchers:
            wake()
        return True


class SingleFlight:
    """The chunks that are being read in this process. Any thread may call."""

    def __init__(self) -> None:
        self._slots: dict[tuple[bytes, bool], Slot] = {}
        self._lock = Lock()

    def claim(self, digests: Sequence[bytes], lossy: bool) -> list[tuple[Slot, bool]]:
        """Return for each digest its slot, and whether the caller has to settle it because it is not being read.

        A lossy request takes part in exact reads, never the other way round.
        """
        with self._lock:
            claimed: list[tuple[Slot, bool]] = []
            for digest in digests:
                slot = self._slots.get((digest, False))
                if slot is None and lossy:
                    slot = self._slots.get((digest, True))
                mine = slot is None
                if slot is None:
                    slot = self._slots[digest, lossy] = Slot()
                claimed.append((slot, mine))
            return claimed

    def land(self, digest: bytes, lossy: bool, slot: Slot) -> None:
        """Remove a settled slot."""
        with self._lock:
            if self._slots.get((digest, lossy)) is slot:
                del self._slots[digest, lossy]

    def __len__(self) -> int:
        return len(self._slots)
