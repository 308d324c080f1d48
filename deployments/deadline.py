"""The longest that a request may take, queueing included."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from deployments.backend import Batch
from turnout.errors import Code, TurnoutError


class Deadline:
    """One point in time for a whole request.

    Args:
        seconds: from now; None: it may take for ever.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._at = None if seconds is None else asyncio.get_running_loop().time() + seconds
        self._waiting: asyncio.Task[Any] | None = None
        self._passed = self._ended = False

    async def over(self, batches: AsyncGenerator[Batch, None]) -> AsyncGenerator[Batch, None]:
        """The same batches; the clock runs while we wait for them, not while the client reads.

        Raises:
            TurnoutError: DEADLINE_EXCEEDED.
        """
        # One timer for all of them: one for each would be half of what a batch costs here.
        timer = None if self._at is None else asyncio.get_running_loop().call_at(self._at, self._pass)
        try:
            while True:
                try:
                    if self._passed:
                        async with self.guard():
                            batch = await anext(batches)
                    else:
                        batch = await self._within(batches)
                except StopAsyncIteration:
                    return
                yield batch
        finally:
            if timer is not None:
                timer.cancel()

    async def _within(self, batches: AsyncGenerator[Batch, None]) -> Batch:
        """The next one, if it comes before the timer does."""
        task = self._waiting = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        try:
            return await anext(batches)
        except asyncio.CancelledError:
            if self._ended and task.cancelling() <= before + 1:
                raise _exceeded(self._seconds) from None
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

    def guard(self) -> Limit:
        """Raise DEADLINE_EXCEEDED when the block is still waiting at the deadline."""
        return Limit(self._at, self._seconds)


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
