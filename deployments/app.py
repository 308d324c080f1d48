"""Build the Serve application from a configuration, and run it on a local or an existing Ray cluster."""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ray
from ray import serve
from ray.exceptions import RayTaskError
from ray.serve.config import HTTPOptions, ProxyLocation, gRPCOptions
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.schema import LoggingConfig

from actors.ray_start import start_ray
from deployments.build_info import this_program
from deployments.cluster_checks import node_offers
from deployments.deadline import BACKSTOP_S
from deployments.embedded_store import EmbeddedStore, start_store
from deployments.ending import end_app
from deployments.grpc_wire import MAX_MESSAGE_BYTES
from deployments.ingress import Ingress
from deployments.listening import check_can_listen, unbound_by_serve
from deployments.placement_check import check_room
from deployments.pool_deployment import PoolLoader, ServedPool, load_engine
from deployments.pool_options import (
    all_bundles,
    ingress_options,
    ingress_version,
    most_replicas,
    num_replicas,
    pool_options,
    pool_version,
    replica_bundles,
)
from deployments.serve_internals import read_authentication_mode, serve_runs
from deployments.serve_status import unsettled_pools
from deployments.starting import Tell, run_until_up, silent
from deployments.version_check import Origin, begin
from turnout.addresses import http_url, reachable
from turnout.calls import PoolStats
from turnout.config import PoolConfig, ServerConfig, TurnoutConfig, load_config
from turnout.errors import invalid

APP_NAME = "turnout"
ADD_TO_SERVER = "deployments.grpc_wire.add_to_server"
QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)


def build_app(
    config: TurnoutConfig, load: PoolLoader = load_engine, late: Mapping[str, int] | None = None
) -> serve.Application:
    """One ingress and one deployment per pool that runs in replicas; unchanged ones keep theirs from the last time.

    Args:
        config: checked already.
        load: makes a pool inside its replica, or inside the ingress; it is pickled, so it must be importable there.
        late: by pool, replicas of the version before that may fail; see `deployments.serve_status.unsettled_pools`.
    """
    pools = {name: pool_app(name, config, load, (late or {}).get(name, 0)) for name in config.replica_pools}
    ingress = _versioned(serve.deployment(Ingress, **ingress_options(config)), ingress_version(config, load))
    return ingress.bind(config, pools, load)


def pool_app(name: str, config: TurnoutConfig, load: PoolLoader, late: int = 0) -> serve.Application:
    """One pool without an ingress: who has a handle may ask it."""
    deployment = serve.deployment(ServedPool, **pool_options(name, config, late))
    version = pool_version(name, config, load)
    return _versioned(deployment, version).bind(name, config, load, Origin(version, this_program()))


def _versioned(deployment: serve.Deployment, version: str) -> serve.Deployment:
    """Without a version of ours, Serve takes every deployment for a new one, and replaces all its replicas."""
    return deployment.options(version=version, _internal=True)


def build(arguments: dict[str, str]) -> serve.Application:
    """For `serve deploy`: `import_path: deployments.app:build`, `args: {config: FILE}`."""
    config = load_config(Path(arguments["config"]))
    check_behind_proxies(config)
    return _begun(config, load_engine)


def check_behind_proxies(config: TurnoutConfig) -> None:
    """Refuse an ingress that listens itself where Serve's proxies listen on every node.

    Raises:
        TurnoutError: INVALID_ARGUMENT.
    """
    if config.server.ingress_processes:
        raise invalid("server.ingress_processes", "must be 0 on a cluster: Serve's proxies listen there, on every node")


def _begun(config: TurnoutConfig, load: PoolLoader) -> serve.Application:
    """As `build_app`, for an application that is deployed now."""
    begin(APP_NAME, {name: pool_version(name, config, load) for name in config.replica_pools})
    return build_app(config, load, unsettled_pools(APP_NAME))


@dataclass
class RunningServer:
    """A served application. `stop` ends what `start` began, and nothing else.

    `listens` says where an ingress that listens itself does; None: Serve's proxy listens.
    """

    grpc_address: str
    http_url: str
    pools: tuple[str, ...]
    temp_dir: Path | None = None
    grace_s: float = 5.0
    store: EmbeddedStore | None = None
    listens: ServerConfig | None = None

    def stats(self) -> dict[str, list[PoolStats]]:
        """What each replica of each pool holds right now; nothing of a pool that has none.

        A pool that the ingress answers itself has those of the ingress.
        """
        answered = serve.get_deployment_handle("ingress", APP_NAME).broadcast("inside").results(timeout_s=10)
        found = {}
        for name in self.pools:
            if inside := [each for process in answered for each in process.get(name, ())]:
                found[name] = inside
                continue
            try:
                answers = serve.get_deployment_handle(f"pool-{name}", APP_NAME).broadcast("stats")
                found[name] = answers.results(timeout_s=10)
            except DeploymentUnavailableError:
                found[name] = []
        return found

    def update(self, config: TurnoutConfig, load: PoolLoader = load_engine) -> None:
        """Serve another configuration, and return when it is served; what runs continues, in a new replica if it must.

        Addresses, the cluster and the embedded store stay as they are.

        Raises:
            TurnoutError: a pool failed to load; INVALID_ARGUMENT: Serve's proxy listens, and is to make room, or the
                other way round.
        """
        if bool(config.server.ingress_processes) != (self.listens is not None):
            raise invalid("server.ingress_processes", "cannot change from or to 0 while the server runs")
        if self.listens is not None:
            config = config.model_copy(update={"server": _at(self.listens, config.server)})
        if self.store is not None:
            config = self.store.joined(config)
        deploy(config, load)
        self.pools = tuple(config.pools)
        self.grace_s = config.server.shutdown_grace_s

    def stop(self) -> None:
        """Stop the application, and Ray with it where it was started here; another cluster stays."""
        try:
            end_app(APP_NAME, self.grace_s)
            ray.shutdown()
        finally:
            if self.temp_dir is not None:
                shutil.rmtree(self.temp_dir, ignore_errors=True)
            if self.store is not None:
                self.store.stop()


def _at(addresses: ServerConfig, server: ServerConfig) -> ServerConfig:
    """Other settings, at the addresses of these."""
    return server.model_copy(update=addresses.model_dump(include={"grpc_port", "http_port", "http_host"}))


def start(config: TurnoutConfig, load: PoolLoader = load_engine, tell: Tell = silent) -> RunningServer:
    """Start Ray on this machine, run the application and return when it answers.

    Another cluster (`ray.address`) is for `deployments.cluster`.

    Args:
        config: checked already.
        load: as for `build_app`.
        tell: gets a line about each thing that has to be waited for.

    Raises:
        TurnoutError: a host or a port cannot be bound, Ray does not start, this machine cannot host a pool, or a pool
            failed to load.
    """
    check_can_listen(config.server)
    temp_dir = start_local_ray(config)
    server = RunningServer(
        grpc_address=f"127.0.0.1:{config.server.grpc_port}",
        http_url=http_url(reachable(config.server.http_host), config.server.http_port),
        pools=tuple(config.pools),
        temp_dir=temp_dir,
        grace_s=config.server.shutdown_grace_s,
        listens=config.server if config.server.ingress_processes else None,
    )
    try:
        for line in check_room(config, all_bundles(config), node_offers(), None):
            tell(line)
        config, server.store = start_store(config)
        run_app(config, load, tell=tell)
    except BaseException:
        server.stop()
        raise
    return server


def run_app(
    config: TurnoutConfig,
    load: PoolLoader = load_engine,
    proxy_location: ProxyLocation = ProxyLocation.HeadOnly,
    tell: Tell = silent,
) -> None:
    """Start Serve on the connected cluster, and the application on it; return when it answers.

    Raises:
        TurnoutError: as `deploy`.
    """
    start_serve(config, proxy_location)
    deploy(config, load, tell)


def start_serve(config: TurnoutConfig, proxy_location: ProxyLocation = ProxyLocation.HeadOnly) -> None:
    """Have Serve listen on the connected cluster; where it does already, it stays as it is.

    Raises:
        TurnoutError: INVALID_ARGUMENT: a node cannot bind the host or a port; names the field.
    """
    timeout_s = config.server.request_timeout_s + BACKSTOP_S
    if config.server.ingress_processes:
        proxy_location = ProxyLocation.Disabled  # the ingress listens itself
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    was_there = serve_runs()
    try:
        serve.start(
            proxy_location=proxy_location,
            http_options=HTTPOptions(
                host=config.server.http_host, port=config.server.http_port, request_timeout_s=timeout_s
            ),
            grpc_options=gRPCOptions(
                port=config.server.grpc_port,
                grpc_servicer_functions=[ADD_TO_SERVER],
                request_timeout_s=timeout_s,
            ),
            logging_config=QUIET,
        )
    except RayTaskError as error:
        if not was_there:  # left there, it would go on trying to bind what cannot be bound
            serve.shutdown()
        raise unbound_by_serve(config.server, error) or error from None


def deploy(config: TurnoutConfig, load: PoolLoader = load_engine, tell: Tell = silent) -> None:
    """Serve the application, or another configuration of it; return when it answers.

    Raises:
        TurnoutError: a pool failed to load, or none of its replicas found a place in time.
    """
    application = _begun(config, load)
    target = serve.RunTarget(target=application, name=APP_NAME, route_prefix="/", logging_config=_logging(config))
    run_until_up(target, config, tell)


def _logging(config: TurnoutConfig) -> LoggingConfig:
    """Serve's log: warnings only; where the log of requests goes there, JSON."""
    logs = config.telemetry.logs
    if logs is None or logs.path is not None:
        return QUIET
    return LoggingConfig(encoding="JSON", log_level="INFO", enable_access_log=False)


def start_local_ray(config: TurnoutConfig) -> Path | None:
    """Start a cluster on this machine, for this process and what it starts.

    Returns:
        Its private folder, to be removed at the end; None where the configuration names one.

    Raises:
        TurnoutError: it is too small for the pools, has no folder that can be written, or has not started.
    """
    needed = math.ceil(sum(num_replicas(pool) * _num_cpus(config, pool) for pool in config.replica_pools.values()))
    if config.ray.num_cpus is not None and config.ray.num_cpus < needed:
        raise invalid("ray.num_cpus", f"must be at least {needed}, for the replicas of all pools and their actors")
    _prepare_environment()
    # Ray opens its folder to everybody: inside a private one, sockets and logs stay ours.
    private = _private_folder(config.ray.temp_dir)
    try:
        start_ray(
            config.ray.temp_dir or f"{private}/ray",
            num_cpus=config.ray.num_cpus or max(_most_cpus(config), os.cpu_count() or 1),
            object_store_memory=config.ray.object_store_bytes,
            _node_ip_address="127.0.0.1",
        )
    except BaseException:
        if private is not None:
            shutil.rmtree(private, ignore_errors=True)
        raise
    return private


def _private_folder(named: str | None) -> Path | None:
    """A new folder for Ray's files; None: the configuration names one.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming `ray.temp_dir`: the one or the other cannot be written.
    """
    try:
        if named is None:
            return Path(tempfile.mkdtemp(prefix="turnout-"))
        Path(named).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=named).close()
    except OSError as error:
        message = f"cannot write {named or 'temporary files'}: {error.strerror}; name a folder that this user can write"
        raise invalid("ray.temp_dir", message) from None
    return None


def _num_cpus(config: TurnoutConfig, pool: PoolConfig) -> float:
    return sum(bundle.get("CPU", 0.0) for bundle in replica_bundles(config, pool))


def _most_cpus(config: TurnoutConfig) -> int:
    """For as many replicas as there may ever be: logical CPUs cost nothing."""
    return math.ceil(sum(most_replicas(pool) * _num_cpus(config, pool) for pool in config.replica_pools.values()))


def _prepare_environment() -> None:
    """Set what Ray and its processes read from the environment; a value the user has set stays."""
    environment = os.environ  # noqa: TID251 - Ray has no other way to pass these to its processes
    root = str(Path(__file__).parents[1])
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    if root not in paths:
        environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, paths)])
    # A private token for this cluster: no other user of the machine can send it code to run.
    if environment.setdefault("RAY_AUTH_MODE", "token") == "token":
        environment.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # Replica to replica over gRPC halves the time per streamed item.
    environment.setdefault("RAY_SERVE_USE_GRPC_BY_DEFAULT", "1")
    environment.setdefault("RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH", str(64 << 20))
    environment.setdefault("RAY_SERVE_GRPC_MAX_MESSAGE_SIZE", str(MAX_MESSAGE_BYTES))
    # Ray runs workers at niceness 15; serving is no background work.
    environment.setdefault("RAY_worker_niceness", "0")
    environment.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    read_authentication_mode()
