"""The ingress processes of one application, as one of them sees all: a scrape of any of them gets the series of all."""

from __future__ import annotations

import os
import time
from typing import Any

from prometheus_client import Metric
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.service import GenerationService
from deployments.telemetry import process_metrics

ANSWER_S = 8.0  # that processes have to answer: a little longer than a pool has to say what it holds

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
        answers = [self.counted(), *(each for each in await self._asked("counted") if isinstance(each, tuple))]
        own = process_metrics.render({name: families for _, name, families in answers})
        _, oldest, _ = min(answers, key=lambda each: each[:2])
        if oldest == self._name:
            return own + await self._exposition.of_pools()
        return own + b"".join(each for each in await self._asked("of_pools", oldest) if isinstance(each, bytes))

    async def _asked(self, method: str, *args: Any) -> list[Any]:
        """What all processes answer; an exception for each that does not."""
        if self._handle is None:
            context = serve.get_replica_context()
            self._handle = serve.get_deployment_handle(context.deployment, context.app_name)
        asked = self._handle.broadcast(method, *args)
        answers: list[Any] = await asked.results_async(timeout_s=ANSWER_S, return_exceptions=True)
        return answers
