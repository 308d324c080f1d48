"""Operations that wait for a forward of one model, in order of arrival, and the hand-over of their results."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from decoding.model import Readout
from decoding.sequence import Sequence
from engine.cache.table import BlockTable
from engine.scheduler.queued_operation import QueuedOperation


class Deliveries:
    """Results that were set but whose methods have not resumed yet, of all models of a device."""

    def __init__(self) -> None:
        self._open: set[asyncio.Future[list[Readout]]] = set()
        self._resumed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()  # tasks that resumed since the last `all_resumed`

    def hand_out(self, future: asyncio.Future[list[Readout]]) -> None:
        """Note that a result was set."""
        self._open.add(future)

    def resumed(self, future: asyncio.Future[list[Readout]]) -> None:
        """Note that the method that awaited a result runs again; called from its task."""
        if future not in self._open:
            return
        self._open.discard(future)
        if (task := asyncio.current_task()) is not None:
            self._tasks.add(task)
        self._resumed.set()

    def clear(self) -> None:
        """Forget results whose event loop has ended."""
        self._open.clear()
        self._tasks.clear()

    async def all_resumed(self) -> None:
        """Wait until each method that was handed a result has run up to its next operation, or elsewhere.

        Where a task ended with the result, as a branch of `asyncio.gather` does, the method is what awaits the task:
        awaiting it in the same way resumes after the method.
        """
        while self._open:
            self._resumed = asyncio.Event()
            await self._resumed.wait()
        ended = [task for task in self._tasks if task.done()]
        self._tasks.clear()
        if ended:
            await asyncio.gather(*ended, return_exceptions=True)


class OperationQueue:
    """Operations that wait for a forward or take part in one; one that ended is no longer in it.

    Args:
        deliveries: where results that are handed out are noted.

    Attributes:
        changes: operations that came or went so far.
    """

    def __init__(self, deliveries: Deliveries) -> None:
        self.changes = 0
        self._deliveries = deliveries
        self._operations: dict[QueuedOperation, None] = {}
        self._low_priority: set[QueuedOperation] = set()
        self._blocked: set[QueuedOperation] = set()  # operations that wait for memory only
        self._sequences = Counter[Sequence]()
        self._tenants = {True: Counter[str](), False: Counter[str]()}  # of awaited operations, by priority class
        self._order = count()

    def __len__(self) -> int:
        return len(self._operations)

    def __iter__(self) -> Iterator[QueuedOperation]:
        return iter(self._operations)

    def __contains__(self, work: QueuedOperation) -> bool:
        return work in self._operations

    def add(self, work: QueuedOperation) -> None:
        """Append an operation; the first one of a sequence sets the sequence's place in the order of arrival."""
        work.order = next(self._order)
        work.estimate()
        if work.table.arrival is None:
            work.table.arrival = work.order
        self.changes += 1
        self._operations[work] = None
        self._sequences[work.table.seq] += 1
        if not work.background:
            self._tenants[work.low_priority][work.tenant] += 1
        if work.low_priority:
            self._low_priority.add(work)

    def requeue(self, work: QueuedOperation) -> None:
        """Move a decode loop that got one token and wants the next to the end."""
        work.order = next(self._order)
        work.remaining = 1

    def discard(self, work: QueuedOperation) -> None:
        """Remove an operation, if it is there."""
        if work not in self._operations:
            return
        self.changes += 1
        del self._operations[work]
        self._sequences[work.table.seq] -= 1
        if not self._sequences[work.table.seq]:
            del self._sequences[work.table.seq]
        if not work.background:
            tenants = self._tenants[work.low_priority]
            tenants[work.tenant] -= 1
            if not tenants[work.tenant]:
                del tenants[work.tenant]
        self._low_priority.discard(work)
        self._blocked.discard(work)

    def finish(self, work: QueuedOperation, rows: list[Readout]) -> None:
        """Remove an operation and hand out its rows."""
        self.discard(work)
        if not work.future.done():
            work.future.set_result(rows)
            self._hand_out(work)

    def fail(self, work: QueuedOperation, error: Exception) -> None:
        """Remove an operation and raise an error in its method."""
        self.discard(work)
        if not work.future.done():
            work.future.set_exception(error)
            self._hand_out(work)

    def _hand_out(self, work: QueuedOperation) -> None:
        """Note that a result was set; a stream is read at its reader's leisure, and no step waits for that."""
        if work.loop is None or not work.loop.streams:
            self._deliveries.hand_out(work.future)

    def cancel_all(self) -> None:
        """Remove and cancel all operations."""
        for work in list(self._operations):
            self.discard(work)
            work.future.cancel()

    def block(self, works: Iterable[QueuedOperation]) -> None:
        """Set which operations wait for memory: until the next call, no time is reserved for them."""
        self._blocked = set(works)

    def unblocked(self, low_priority: bool) -> list[QueuedOperation]:
        """List the operations of a priority class that do not wait for memory."""
        return [work for work in self.of(low_priority) if work not in self._blocked]

    def of(self, low_priority: bool) -> list[QueuedOperation]:
        """List the operations of a priority class."""
        return [work for work in self._operations if work.low_priority is low_priority]

    def on(self, table: BlockTable) -> list[QueuedOperation]:
        """List the operations on a cache."""
        return [work for work in self._operations if work.table is table] if self.has_operation(table.seq) else []

    def has(self, low_priority: bool) -> bool:
        """Return whether a method waits for an operation of a priority class; background operations do not count."""
        return bool(self._tenants[low_priority])

    def has_operation(self, seq: Sequence) -> bool:
        """Return whether an operation on a sequence waits or runs."""
        return seq in self._sequences

    def tenants(self, low_priority: bool) -> set[str]:
        """Return the tenants of a priority class that wait for time: not in the background, and not for memory."""
        if not self._blocked:
            return set(self._tenants[low_priority])
        works = self._low_priority if low_priority else self._operations
        counted = (work for work in works if work.low_priority is low_priority and not work.background)
        return {work.tenant for work in counted if work not in self._blocked}

    def candidates(self, low_priority: bool) -> list[QueuedOperation]:
        """Return what could run now, brought up to date; one operation per cache.

        Args:
            low_priority: low-priority operations and all background ones; otherwise interactive operations only, and
                their background ones.
        """
        found: list[QueuedOperation] = []
        busy: set[BlockTable] = set()
        # Operations that are awaited go before background ones on the same cache.
        for background in (False, True):
            for work in [work for work in self._operations if work.background is background]:
                if work.low_priority is not low_priority and (work.low_priority or not background):
                    continue
                if work.table in busy or work.future.done():
                    continue
                if work.started or background:
                    work.refresh()
                else:
                    work.estimate()
                if work.remaining == 0:
                    self.finish(work, work.rows)
                else:
                    busy.add(work.table)
                    found.append(work)
        return found
