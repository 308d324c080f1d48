"""Fewer, larger steps through the cluster: what a pool emits in quick succession travels together.

A hop between processes costs a fixed time per item, and a small model emits items faster than hops carry them.
The first item leaves at once; later ones leave when the pace allows, with whatever has arrived by then.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Self

from deployments.backend import Batch, merge
from turnout.calls import Chunk, Event
from turnout.message_size import PART_UNITS, units

Fill = Callable[[Callable[[Event], None]], Awaitable[None]]


class Pace:
    """Shares a budget of items per second between the streams of a replica; one alone is not held back."""

    def __init__(self, items_per_second: float = 160.0, longest_gap_s: float = 0.1) -> None:
        self._items_per_second = items_per_second
        self._longest_gap_s = longest_gap_s
        self.streams = 0

    @property
    def gap_s(self) -> float:
        """Shortest time between two items of one stream, in seconds."""
        return min(self._longest_gap_s, self.streams / self._items_per_second) if self.streams > 1 else 0.0


class Coalescer:
    """Iterator over batches at least `gap_s()` seconds apart; the first and the last batch are not delayed.

    Closing it, or cancelling the task that waits for a batch, cancels the source and waits until it has unwound.

    Args:
        fill: the source: gives each event to the function it is called with. Its exceptions come after its events.
        gap_s: seconds.
    """

    def __init__(self, fill: Fill, gap_s: Callable[[], float]) -> None:
        self._fill = fill
        self._gap_s = gap_s
        self._source: asyncio.Task[None] | None = None
        self._events: list[Event] = []
        self._ended = False
        self._awaited: asyncio.Future[None] | None = None  # what the reader waits for, an event or the end of a gap
        self._held = False  # until a gap has passed
        self._last_sent = -math.inf

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        if self._source is None:
            self._source = asyncio.create_task(self._run())
        try:
            while self._events or not self._ended:
                if not self._events:
                    await self._wait()
                if not self._ended and (wait_s := self._last_sent + self._gap_s() - monotonic()) > 0:
                    await self._wait_until_ended(wait_s)
                batch = merge(self._take())
                self._last_sent = monotonic()
                if batch:
                    return batch
            await self._source
        except BaseException:
            await self.aclose()
            raise
        raise StopAsyncIteration

    async def _wait(self) -> None:
        """Wait for an event or the end."""
        self._awaited = asyncio.get_running_loop().create_future()
        await self._awaited

    async def _wait_until_ended(self, longest_s: float) -> None:
        """Wait for the end, but no longer than this; events that come meanwhile are collected."""
        timer = asyncio.get_running_loop().call_later(longest_s, self._wake)
        self._held = True
        try:
            await self._wait()
        finally:
            self._held = False
            timer.cancel()

    async def aclose(self) -> None:
        """Cancel the source, and wait until it has unwound."""
        if self._source is None:
            return
        self._source.cancel()
        await asyncio.wait([self._source])
        if not self._source.cancelled():
            self._source.exception()  # raised by `__anext__`, or after its reader left

    async def _run(self) -> None:
        try:
            await self._fill(self._put)
        finally:
            self._ended = True
            self._wake()

    def _put(self, event: Event) -> None:
        self._events.append(event)
        if not self._held:
            self._wake()

    def _wake(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)

    def _take(self) -> list[Event]:
        """Take what has arrived, up to what fits one message: a slow reader may find much."""
        if len(self._events) == 1:
            events, self._events = self._events, []
            return events
        size = taken = 0
        for event in self._events:
            size += _units(event)
            if taken and size > PART_UNITS:
                break
            taken += 1
        events, self._events = self._events[:taken], self._events[taken:]
        return events


def _units(event: Event) -> int:
    tokens = event.tokens if isinstance(event, Chunk) else ()
    return units(len(tokens), len(tokens[0].top)) if tokens else 0
