"""Answers that all who ask at about the same time share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from math import inf
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SharedAnswer(Generic[T]):
    """Asks no more often than once in a while, however many want to know. One event loop.

    Args:
        ask: gives the answer; an error of it is shared too.
        kept_s: an answer that was asked for so many seconds ago is still good.
        clock: seconds.
    """

    def __init__(
        self, ask: Callable[[], Coroutine[Any, Any, T]], kept_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask = ask
        self._kept_s = kept_s
        self._clock = clock
        self._asked = -inf
        self._answer: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """The answer: of now, or of just before."""
        now = self._clock()
        if self._answer is None or (self._answer.done() and now - self._asked >= self._kept_s):
            self._asked, self._answer = now, asyncio.create_task(self._ask())
        # Whoever leaves does not take it away from the others.
        return await asyncio.shield(self._answer)
