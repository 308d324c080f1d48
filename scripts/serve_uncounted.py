"""`turnout serve`, but nothing is counted, logged or traced of a request: what `bench_telemetry` compares with."""

from __future__ import annotations

from ray.serve.handle import DeploymentHandle

from cli.main import main
from deployments import app
from deployments.ingress import Ingress
from deployments.pool_deployment import PoolLoader
from deployments.telemetry.request_trace import UntracedRequests
from turnout.config import TurnoutConfig


class UncountedIngress(Ingress):
    """The ingress, without eyes."""

    # Serve makes constructors of ingresses coroutines.
    async def __init__(  # type: ignore[misc]
        self, config: TurnoutConfig, pools: dict[str, DeploymentHandle], load: PoolLoader
    ) -> None:
        await super().__init__(config, pools, load)  # type: ignore[misc]
        self.service.tracer = UntracedRequests(self.service.metrics)


if __name__ == "__main__":
    # By this name, and not as part of `__main__`, the other processes find it.
    from scripts.serve_uncounted import UncountedIngress as Found

    setattr(app, "Ingress", Found)  # noqa: B010 - a name that the module does not offer
    main()
