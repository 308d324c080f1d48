"""The Serve ingress: one deployment answers both gRPC and HTTP.

It imports torch only where it answers a pool itself: one whose models are all endpoints.
"""

from __future__ import annotations

import os

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.backend import Backend
from deployments.direct_servers import DirectServers
from deployments.grpc_server import GrpcServicer
from deployments.http import build_http
from deployments.ingress_group import Counted, IngressGroup
from deployments.local_backend import LocalBackend
from deployments.metrics import Metrics
from deployments.pool_answers import PoolAnswers
from deployments.pool_deployment import PoolLoader
from deployments.remote import RemoteBackend
from deployments.serve_internals import route_in_this_loop
from deployments.service import GenerationService
from deployments.telemetry.request_log import RequestLog
from turnout.calls import PoolStats
from turnout.config import TurnoutConfig
from turnout.gc_freeze import freeze_loaded
from turnout.tracing import set_up


@serve.ingress()
class Ingress(GrpcServicer):
    """Holds the service over all pools.

    Args:
        config: the whole configuration.
        pools: handles of the pools that run in replicas, by name; the others are loaded here.
        load: makes these.
    """

    def __init__(self, config: TurnoutConfig, pools: dict[str, DeploymentHandle], load: PoolLoader) -> None:
        self._server = config.server
        self._direct: DirectServers | None = None
        telemetry = config.telemetry
        set_up(telemetry.traces, "ingress")
        place = f"{ray.util.get_node_ip_address()} pid {os.getpid()}"
        self._inside = {
            name: LocalBackend(PoolAnswers(load(name, config), place=place))
            for name in config.pools
            if name not in pools
        }
        backends: dict[str, Backend] = {
            name: self._inside[name] if name in self._inside else _remote(name, config, pools[name])
            for name in config.pools
        }
        log = RequestLog(telemetry.logs) if telemetry.logs is not None else None
        self.service = GenerationService(config, backends, Metrics(telemetry.slo, config.pools), log)
        self._group = IngressGroup(self.service)
        if config.server.ingress_processes > 1:
            self.service.exposition.together = self._group.exposition
        freeze_loaded()

    async def inside(self) -> dict[str, list[PoolStats]]:
        """What the pools that are answered here hold right now."""
        return {name: await backend.stats() for name, backend in self._inside.items()}

    async def counted(self) -> Counted:
        """See `IngressGroup.counted`."""
        return self._group.counted()

    async def of_pools(self, name: str) -> bytes | None:
        """See `IngressGroup.of_pools`."""
        return await self._group.of_pools(name)

    async def __del__(self) -> None:
        """Serve awaits this before it ends the process."""
        service = getattr(self, "service", None)  # there is none where it could not be made
        if service is None:
            return
        if self._direct is not None:
            await self._direct.stop(self._server.request_timeout_s)
        service.close()
        for backend in self._inside.values():
            await backend.close()

    async def __serve_build_asgi_app__(self) -> object:
        """The HTTP side. Where this process is to listen itself, it does so from now on."""
        app = build_http(self.service)
        if self._server.ingress_processes:
            self._direct = DirectServers(self._server, app, self)
            await self._direct.start()
        return app

    async def check_health(self) -> None:
        """Have Serve replace a process that does not answer any more.

        Raises:
            RuntimeError: it does not.
        """
        if self._direct is not None:
            self._direct.check()


def _remote(name: str, config: TurnoutConfig, handle: DeploymentHandle) -> RemoteBackend:
    pool = config.pools[name]
    sleeps = pool.autoscaling is not None and pool.autoscaling.min_replicas == 0
    sticky = pool.routing.sticky if pool.routing is not None else None
    route_in_this_loop(handle)
    return RemoteBackend(name, handle, routed=pool.routing is not None, sticky=sticky, sleeps=sleeps)
