"""What the replicas of all pools say of themselves, and the health of the server by it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from deployments.backend import Backend
from deployments.health import HealthReport, SharedAnswer, health_of
from turnout.calls import PoolStats
from turnout.errors import Code, TurnoutError

HEALTH_KEPT_S = 1.0
HEALTH_TIMEOUT_S = 6.0  # a little longer than a pool waits for its replicas


class PoolHealth:
    """Asks all pools at once.

    Args:
        backends: the pools by name.
    """

    def __init__(self, backends: Mapping[str, Backend]) -> None:
        self._backends = backends
        self._shared = SharedAnswer(self._look, HEALTH_KEPT_S)

    async def stats(self) -> dict[str, list[PoolStats] | TurnoutError]:
        """What the replicas of each pool hold right now; of a pool that does not answer, why."""
        answers = await asyncio.gather(*(_stats(*each) for each in self._backends.items()))
        return dict(zip(self._backends, answers, strict=True))

    async def answered(self) -> dict[str, list[PoolStats]]:
        """The same of those that answer."""
        return {name: stats for name, stats in (await self.stats()).items() if not isinstance(stats, TurnoutError)}

    async def report(self) -> HealthReport:
        """Return the health of all pools, as of now or of a second ago."""
        return await self._shared.get()

    async def _look(self) -> HealthReport:
        return health_of(await self.stats())


async def _stats(name: str, backend: Backend) -> list[PoolStats] | TurnoutError:
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            return await backend.stats()
    except TimeoutError:
        return TurnoutError(Code.UNAVAILABLE, f"pool {name!r} does not answer within {HEALTH_TIMEOUT_S:g} s")
    except TurnoutError as error:
        return error
