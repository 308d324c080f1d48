"""Fewer, larger steps through the cluster: what a pool emits in quick succession travels together.

A hop between processes costs a fixed time per item, and a small model emits items faster than hops carry them.
The first item leaves at once; later ones leave when the pace allows, with whatever has arrived by then.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from time import monotonic

from deployments.backend import Batch, merge
from turnout.calls import Chunk, Event
from turnout.message_size import PART_UNITS, units


class Pace:
    """Shares a budget of items per second between the streams of a replica: one stream is not held back."""

    def __init__(self, items_per_second: float = 160.0, longest_gap_s: float = 0.1) -> None:
        self._items_per_second = items_per_second
        self._longest_gap_s = longest_gap_s
        self.streams = 0

    @property
    def gap_s(self) -> float:
        """Shortest time between two items of one stream, in seconds."""
        return min(self._longest_gap_s, self.streams / self._items_per_second)


class _Inbox:
    """Events that arrived and were not sent yet."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = False
        self.arrived = asyncio.Event()
        self.ended = asyncio.Event()

    async def fill(self, events: AsyncIterator[Event]) -> None:
        try:
            async for event in events:
                self.events.append(event)
                self.arrived.set()
        finally:
            self.closed = True
            self.arrived.set()
            self.ended.set()

    def take(self) -> list[Event]:
        """What has arrived, up to what fits one message: where nobody took any for a while, it may be much."""
        size = taken = 0
        for event in self.events:
            size += _units(event)
            if taken and size > PART_UNITS:
                break
            taken += 1
        events, self.events = self.events[:taken], self.events[taken:]
        if not self.closed and not self.events:
            self.arrived.clear()
        return events


def _units(event: Event) -> int:
    tokens = event.tokens if isinstance(event, Chunk) else ()
    return units(len(tokens), len(tokens[0].top)) if tokens else 0


async def coalesce(events: AsyncIterator[Event], gap_s: Callable[[], float]) -> AsyncGenerator[Batch, None]:
    """Merge events into batches at least `gap_s()` seconds apart; the first and the last are not delayed.

    Closing the generator, or cancelling the task that runs it, cancels `events` and waits until it has unwound.
    """
    inbox = _Inbox()
    pump = asyncio.create_task(inbox.fill(events))
    last_sent = -math.inf
    try:
        while True:
            await inbox.arrived.wait()
            wait_s = last_sent + gap_s() - monotonic()
            if wait_s > 0 and not inbox.closed:
                with suppress(TimeoutError):
                    await asyncio.wait_for(inbox.ended.wait(), wait_s)
            batch = merge(inbox.take())
            last_sent = monotonic()
            if batch:
                yield batch
            if inbox.closed and not inbox.events:
                break
        await pump
    finally:
        pump.cancel()
        await asyncio.wait([pump])
        if not pump.cancelled():
            pump.exception()  # already raised above, or nobody is left to hear it
