"""Retries of requests that were refused for a passing reason."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from turnout.errors import Code, TurnoutError

T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 30.0


async def retried(ask: Callable[[], Awaitable[T]], passing: Mapping[Code, float]) -> T:
    """Return the answer of the first try that is not refused for a passing reason; pauses between tries grow.

    Args:
        ask: tries once.
        passing: codes of errors that may be gone the next time, and how long they may take to go, in seconds.

    Raises:
        TurnoutError: that of the last try.
    """
    began, pause_s = time.monotonic(), FIRST_PAUSE_S
    while True:
        try:
            return await ask()
        except TurnoutError as error:
            wait_s = min(max(pause_s, error.retry_after_s or 0.0), LONGEST_PAUSE_S)
            if time.monotonic() + wait_s > began + passing.get(error.code, 0.0):
                raise
        await asyncio.sleep(wait_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
