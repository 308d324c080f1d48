"""The text that a scrape of an ingress gets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from prometheus_client import Metric

from deployments.access.callers import Callers
from deployments.metrics import Metrics
from deployments.telemetry.request_log import AuditLog, RequestLog
from turnout.calls import PoolStats


class Exposition:
    """Metrics of one ingress process and of the pools, as text.

    Args:
        metrics: counted there.
        answered: what the replicas of each pool that answers say just now.
        held: what there is of requests just now, by one of INGRESS_STATES.
        callers: whose files may be at fault.
        log: what audits found is written there; None: nowhere.

    Attributes:
        together: gives the metrics of all ingress processes; None: this one is alone.
    """

    def __init__(
        self,
        metrics: Metrics,
        answered: Callable[[], Awaitable[Mapping[str, list[PoolStats]]]],
        held: Callable[[], Mapping[str, int]],
        callers: Callers,
        log: RequestLog | None,
    ) -> None:
        self._metrics, self._answered, self._held, self._callers = metrics, answered, held, callers
        self._audits = AuditLog(log.write, log.texts) if log is not None else None
        self.together: Callable[[], Awaitable[bytes]] | None = None

    async def text(self) -> bytes:
        """All metrics; what a pool counts is as of now, or of the last time it answered."""
        if self.together is not None:
            return await self.together()
        await self.of_pools()
        self.counted()
        return self._metrics.render()

    async def of_pools(self) -> bytes:
        """Metrics of what the pools' replicas say."""
        answered = await self._answered()
        self._metrics.stores(answered)
        if self._audits is not None:
            self._audits.take(answered)
        return self._metrics.render_pools()

    def counted(self) -> list[Metric]:
        """What this process counts, as of now."""
        self._metrics.access_faults(len(self._callers.faults))
        self._metrics.ingress(self._held(), len(asyncio.all_tasks()))
        return self._metrics.counted()
