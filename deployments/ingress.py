"""The Serve ingress: one deployment answers both gRPC and HTTP. It never imports torch."""

from __future__ import annotations

from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.grpc_server import GrpcServicer
from deployments.http import build_http
from deployments.metrics import Metrics
from deployments.remote import RemoteBackend
from deployments.serve_internals import route_in_this_loop
from deployments.service import GenerationService
from deployments.telemetry.request_log import RequestLog
from turnout.config import TurnoutConfig
from turnout.gc_freeze import freeze_loaded
from turnout.tracing import set_up


@serve.ingress()
class Ingress(GrpcServicer):
    """Holds the service over one handle per pool."""

    def __init__(self, config: TurnoutConfig, pools: dict[str, DeploymentHandle]) -> None:
        backends = {name: _backend(name, config, handle) for name, handle in pools.items()}
        telemetry = config.telemetry
        set_up(telemetry.traces, "ingress")
        log = RequestLog(telemetry.logs) if telemetry.logs is not None else None
        self.service = GenerationService(config, backends, Metrics(telemetry.slo, config.pools), log)
        freeze_loaded()

    def __del__(self) -> None:
        """Serve calls this before it ends the process."""
        service = getattr(self, "service", None)  # there is none where it could not be made
        if service is not None:
            service.close()

    def __serve_build_asgi_app__(self) -> object:
        """The HTTP side."""
        return build_http(self.service)


def _backend(name: str, config: TurnoutConfig, handle: DeploymentHandle) -> RemoteBackend:
    pool = config.pools[name]
    sleeps = pool.autoscaling is not None and pool.autoscaling.min_replicas == 0
    sticky = pool.routing.sticky if pool.routing is not None else None
    route_in_this_loop(handle)
    return RemoteBackend(name, handle, routed=pool.routing is not None, sticky=sticky, sleeps=sleeps)
