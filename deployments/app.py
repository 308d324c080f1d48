"""Build the Serve application from a configuration, and run it on a local or an existing Ray cluster."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import socket
import tempfile
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import ray
from ray import serve
from ray._raylet import Config as RayNativeConfig  # type: ignore[attr-defined]
from ray.serve.config import HTTPOptions, ProxyLocation, gRPCOptions
from ray.serve.exceptions import RayServeException
from ray.serve.schema import LoggingConfig

from deployments.embedded_store import EmbeddedStore, start_store
from deployments.ingress import Ingress
from deployments.pool_deployment import PoolLoader, ServedPool, load_local_pool
from turnout.calls import PoolStats
from turnout.config import PoolConfig, TurnoutConfig, load_config
from turnout.errors import Code, TurnoutError, invalid

APP_NAME = "turnout"
ADD_TO_SERVER = "deployments.grpc_wire.add_to_server"
EXCEPTION_LINE = re.compile(r"[A-Za-z_][\w.]*(Error|Exception): ")
# Our own deadline fires first and says which field; Serve's is for a stuck ingress.
BACKSTOP_S = 15.0
# Calls that ask for no place in a pool (its models, its state) get through beside all that do.
CONTROL_CALLS = 16


def build_app(config: TurnoutConfig, load: PoolLoader = load_local_pool) -> serve.Application:
    """One ingress and one deployment per pool.

    Args:
        config: checked already.
        load: makes a pool inside its replica; it is pickled, so it must be importable there.
    """
    pools = {
        name: serve.deployment(
            ServedPool,
            name=f"pool-{name}",
            num_replicas=pool.replicas,
            max_ongoing_requests=_num_in_replica(pool),
            max_queued_requests=pool.max_queued_requests,
            max_constructor_retry_count=1,  # a pool that does not load now will not load in a minute
            ray_actor_options={"num_cpus": 1, "num_gpus": _num_gpus(config, pool)},
            graceful_shutdown_timeout_s=config.server.shutdown_grace_s,
            health_check_period_s=5,
        ).bind(name, config, load)
        for name, pool in config.pools.items()
    }
    ingress = serve.deployment(
        Ingress,
        name="ingress",
        # Never the bottleneck: pools refuse, and their refusal names the pool.
        max_ongoing_requests=sum(_num_admitted(pool) for pool in config.pools.values()) + 64,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=config.server.shutdown_grace_s,
        health_check_period_s=5,
    )
    return ingress.bind(config, pools)


def build(arguments: dict[str, str]) -> serve.Application:
    """For `serve deploy`: `import_path: deployments.app:build`, `args: {config: FILE}`."""
    return build_app(load_config(Path(arguments["config"])))


def _num_gpus(config: TurnoutConfig, pool: PoolConfig) -> int:
    devices = {config.models[name].device for name in (pool.small, pool.large)}
    return len(devices - {"cpu"})


def _num_in_replica(pool: PoolConfig) -> int:
    """Requests wait inside the replica, which knows their tenants; Serve's own queue is first come, first served."""
    return pool.max_ongoing_requests + pool.max_queued_requests + CONTROL_CALLS


def _num_admitted(pool: PoolConfig) -> int:
    return pool.replicas * _num_in_replica(pool) + pool.max_queued_requests


@dataclass
class RunningServer:
    """A served application. `stop` ends what `start` began, and nothing else."""

    grpc_address: str
    http_url: str
    pools: tuple[str, ...]
    temp_dir: Path | None = None
    store: EmbeddedStore | None = None

    def stats(self) -> dict[str, list[PoolStats]]:
        """What each replica of each pool holds right now."""
        handles = {name: serve.get_deployment_handle(f"pool-{name}", APP_NAME) for name in self.pools}
        return {name: handle.broadcast("stats").results(timeout_s=10) for name, handle in handles.items()}

    def stop(self) -> None:
        """Stop the application, and Ray with it where it was started here; another cluster goes on."""
        try:
            with suppress(RayServeException):  # Serve never came up
                serve.delete(APP_NAME)
            ray.shutdown()
        finally:
            if self.temp_dir is not None:
                shutil.rmtree(self.temp_dir, ignore_errors=True)
            if self.store is not None:
                self.store.stop()


def start(config: TurnoutConfig, load: PoolLoader = load_local_pool) -> RunningServer:
    """Start (or connect to) Ray, run the application and return when it answers.

    Raises:
        TurnoutError: a port is taken, the cluster is too small, or a pool failed to load.
    """
    temp_dir = None
    if config.ray.address is None:
        for field in ("grpc_port", "http_port"):
            _check_port(f"server.{field}", getattr(config.server, field))
        temp_dir = _start_local_ray(config)
    else:
        ray.init(address=config.ray.address, log_to_driver=False, logging_level=logging.ERROR)
    server = RunningServer(
        grpc_address=f"127.0.0.1:{config.server.grpc_port}",
        http_url=f"http://{config.server.http_host}:{config.server.http_port}",
        pools=tuple(config.pools),
        temp_dir=temp_dir,
    )
    try:
        config, server.store = start_store(config)
        _run(config, load)
    except BaseException:
        server.stop()
        raise
    return server


def _run(config: TurnoutConfig, load: PoolLoader) -> None:
    timeout_s = config.server.request_timeout_s + BACKSTOP_S
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(
        proxy_location=ProxyLocation.HeadOnly,
        http_options=HTTPOptions(
            host=config.server.http_host, port=config.server.http_port, request_timeout_s=timeout_s
        ),
        grpc_options=gRPCOptions(
            port=config.server.grpc_port,
            grpc_servicer_functions=[ADD_TO_SERVER],
            request_timeout_s=timeout_s,
        ),
        logging_config=quiet,
    )
    try:
        serve.run(build_app(config, load), name=APP_NAME, route_prefix="/", logging_config=quiet)
    except RuntimeError as error:
        reason = _start_failure() or str(error)
        raise TurnoutError(Code.UNAVAILABLE, f"the application did not start: {reason}") from None


def _start_failure() -> str | None:
    """Why a replica did not start: the last line of the traceback that Serve keeps as its status."""
    application = serve.status().applications.get(APP_NAME)
    for name, deployment in application.deployments.items() if application else ():
        lines = [line.strip() for line in deployment.message.splitlines() if EXCEPTION_LINE.match(line.strip())]
        if lines:
            return f"{name}: {lines[-1].removeprefix('turnout.errors.TurnoutError: ')}"
    return None


def _start_local_ray(config: TurnoutConfig) -> Path | None:
    needed = sum(pool.replicas for pool in config.pools.values())
    if config.ray.num_cpus is not None and config.ray.num_cpus < needed:
        raise invalid("ray.num_cpus", f"must be at least {needed}, one per pool replica")
    _prepare_environment()
    # Ray opens its folder to everybody: inside a private one, sockets and logs stay ours.
    private = None if config.ray.temp_dir else Path(tempfile.mkdtemp(prefix="turnout-"))
    try:
        ray.init(
            address="local",
            num_cpus=config.ray.num_cpus or max(needed, os.cpu_count() or 1),
            object_store_memory=config.ray.object_store_bytes,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=config.ray.temp_dir or f"{private}/ray",
            _node_ip_address="127.0.0.1",
        )
    except BaseException:
        if private is not None:
            shutil.rmtree(private, ignore_errors=True)
        raise
    return private


def _prepare_environment() -> None:
    """Set what Ray and its processes read from the environment; a value the user has set stays."""
    environment = os.environ  # noqa: TID251 - Ray has no other way to pass these to its processes
    root = str(Path(__file__).parents[1])
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    if root not in paths:
        environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, paths)])
    # A private token for this cluster: nobody else on the machine can hand it code to run.
    if environment.setdefault("RAY_AUTH_MODE", "token") == "token":
        environment.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # Replica to replica over gRPC halves the time per streamed item.
    environment.setdefault("RAY_SERVE_USE_GRPC_BY_DEFAULT", "1")
    environment.setdefault("RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH", str(64 << 20))
    # Ray runs workers at niceness 15; serving is no background work.
    environment.setdefault("RAY_worker_niceness", "0")
    environment.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    RayNativeConfig.initialize("")  # importing ray has read the authentication mode already


def _check_port(field: str, port: int) -> None:
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            raise invalid(field, f"port {port} is taken; choose another one") from None
