"""The ingress processes of one application, as one of them sees all: a scrape of any of them gets the series of all."""

from __future__ import annotations

import os
import time
from typing import Any

from prometheus_client import Metric
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.pool_health import HEALTH_TIMEOUT_S
from deployments.serve_internals import answers_of_all
from deployments.service import GenerationService
from deployments.telemetry import process_metrics

# That processes have to answer; the oldest, which asks the pools, a little longer than these have. A scrape has ten.
COUNTED_S, POOLS_S = 3.0, HEALTH_TIMEOUT_S + 0.5

Counted = tuple[int, str, list[Metric]]


class IngressGroup:
    """One process's part in a group.

    What the pools' replicas hold is reported by the process that began first: counters of replicas are made
    monotonic in each process by itself, and an audit's finding is written down once.

    Args:
        service: this process's.
    """

    def __init__(self, service: GenerationService) -> None:
        self._exposition = service.exposition
        self._began, self._name = time.time_ns(), str(os.getpid())
        self._handle: DeploymentHandle | None = None

    def counted(self) -> Counted:
        """When this process began, its name, and what it counts."""
        return self._began, self._name, self._exposition.counted()

    async def of_pools(self, name: str) -> bytes | None:
        """What the pools' replicas hold, as text; None: another process is asked."""
        return await self._exposition.of_pools() if name == self._name else None

    async def exposition(self) -> bytes:
        """All metrics of all processes as text; one that does not answer is left out."""
        answers: list[Counted] = [self.counted(), *await self._asked(COUNTED_S, "counted")]
        own = process_metrics.render({name: families for _, name, families in answers})
        _, oldest, _ = min(answers, key=lambda each: each[:2])
        if oldest == self._name:
            return own + await self._exposition.of_pools()
        return own + b"".join(filter(None, await self._asked(POOLS_S, "of_pools", oldest)))

    async def _asked(self, timeout_s: float, method: str, *args: Any) -> list[Any]:
        """What those processes answer that do in time."""
        if self._handle is None:
            context = serve.get_replica_context()
            self._handle = serve.get_deployment_handle(context.deployment, context.app_name)
        return await answers_of_all(self._handle.broadcast(method, *args), timeout_s)
