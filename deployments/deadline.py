"""The longest that a request may take, queueing included."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Self

from deployments.backend import Batch
from turnout.errors import Code, TurnoutError

# Our own deadline fires first and says which field; what is beyond it is for a stuck ingress, and for slow readers.
BACKSTOP_S = 15.0


class Deadline:
    """One point in time for a whole request.

    Args:
        seconds: from now; None: none.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.at = None if seconds is None else asyncio.get_running_loop().time() + seconds

    def over(self, batches: AsyncGenerator[Batch, None]) -> TimedBatches:
        """Return the same batches, each of which comes before the deadline."""
        return TimedBatches(batches, self)

    def guard(self) -> Limit:
        """Raise DEADLINE_EXCEEDED when the block is still waiting at the deadline."""
        return Limit(self.at, self.seconds)


class TimedBatches:
    """Iterator over batches up to a deadline; the clock runs while it waits for them, not while the client reads.

    Raises:
        TurnoutError: DEADLINE_EXCEEDED.
    """

    def __init__(self, batches: AsyncGenerator[Batch, None], deadline: Deadline) -> None:
        self._batches = batches
        self._deadline = deadline
        # One timer for all batches: one for each would be half of what a batch costs here.
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: asyncio.Task[Any] | None = None
        self._passed = self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        if self._timer is None and self._deadline.at is not None:
            self._timer = asyncio.get_running_loop().call_at(self._deadline.at, self._pass)
        try:
            if self._passed:
                async with self._deadline.guard():
                    return await anext(self._batches)
            return await self._within()
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Cancel the timer; the batches are closed by their owner."""
        if self._timer is not None:
            self._timer.cancel()

    async def _within(self) -> Batch:
        """Return the next batch, if it comes before the timer does."""
        task = self._waiting = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        try:
            return await anext(self._batches)
        except asyncio.CancelledError:
            if self._ended and task.cancelling() <= before + 1:
                raise _exceeded(self._deadline.seconds) from None
            raise
        finally:
            self._waiting = None
            if self._ended:
                task.uncancel()

    def _pass(self) -> None:
        self._passed = True
        if self._waiting is not None:
            self._ended = True
            self._waiting.cancel()


class Limit:
    """A block that ends at a point in time.

    Args:
        at: by the loop's clock; None: never.
        seconds: how long that is, for people.
    """

    def __init__(self, at: float | None, seconds: float | None) -> None:
        self._timeout = asyncio.timeout_at(at)
        self._seconds = seconds

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise _exceeded(self._seconds) from None


def _exceeded(seconds: float | None) -> TurnoutError:
    return TurnoutError(Code.DEADLINE_EXCEEDED, f"deadline_s: the call took longer than {seconds:g} s", "deadline_s")
