"""Delayed refusals: a tenant that retries before its `Retry-After` waits here for a part of that time.

Without this a tenant over its limits that takes no notice of refusals has as many of them as the machine can make, and
everybody else waits behind them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from math import inf

from turnout.errors import Code, TurnoutError

MOST_HELD = 128  # of all tenants; more are answered at once
LONGEST_S = 1.0


class Tarpit:
    """Tarpit for tenants that were asked to wait, in one event loop.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}  # until when, by tenant
        self._num_held = 0

    @property
    def num_held(self) -> int:
        """Refusals that wait."""
        return self._num_held

    async def hold(self, tenant: str, error: TurnoutError) -> None:
        """Return when a refusal may be answered: at once, where the tenant was not asked to wait just before."""
        if error.code is not Code.RESOURCE_EXHAUSTED:
            return
        wait_s, now = min(error.retry_after_s or LONGEST_S, LONGEST_S), self._clock()
        early = now < self._until.get(tenant, -inf)
        self._until[tenant] = now + wait_s
        if not early or self._num_held >= MOST_HELD:
            return
        self._num_held += 1
        try:
            await asyncio.sleep(wait_s)
        finally:
            self._num_held -= 1
