"""Serving on a Ray cluster that runs already: connecting to it, deploying, leaving, ending."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

import grpc
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions, ProxyLocation, gRPCOptions
from ray.serve.exceptions import RayServeException

from deployments.app import ADD_TO_SERVER, APP_NAME, RunningServer, check_behind_proxies, run_app
from deployments.build_info import this_program
from deployments.cluster_checks import check_clocks, check_nodes, growth, node_offers
from deployments.deadline import BACKSTOP_S
from deployments.placement_check import check_room
from deployments.pool_deployment import PoolLoader, load_engine
from deployments.pool_options import all_bundles
from deployments.serve_internals import (
    check_alive,
    is_a_node,
    listening,
    read_authentication_mode,
    resolve_address,
    serve_runs,
)
from deployments.serve_status import applications
from deployments.starting import Tell, silent
from turnout.addresses import host_port, http_url, reachable
from turnout.config import TurnoutConfig
from turnout.errors import Code, TurnoutError, invalid
from turnout.kvstore_config import EMBEDDED

PROBE_TIMEOUT_S = 5.0
TOKEN_SOURCES = "RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token"


def connect(address: str) -> None:
    """Make this process a driver of a running cluster. It must run on one of its nodes.

    Args:
        address: HOST:PORT of the head, or "auto": the cluster of this machine.

    Raises:
        TurnoutError: UNAVAILABLE: nothing answers there, it refuses this process's token, or it runs another version of
            Ray or Python; INVALID_ARGUMENT: no address.
    """
    if ray.is_initialized():
        return
    _prepare_environment()
    place = _resolve(address)
    _probe(place)
    if not is_a_node():
        message = (
            f"no node of the cluster at {place} is on this machine: run this on a node (`ray exec CLUSTER.yaml ...`)"
        )
        raise TurnoutError(Code.UNAVAILABLE, message, "cluster")
    try:
        ray.init(address=place, log_to_driver=False, logging_level=logging.ERROR)
    except (RuntimeError, ConnectionError, ValueError) as error:
        cause = error.__cause__ or error
        raise TurnoutError(Code.UNAVAILABLE, f"cluster at {place}: {' '.join(str(cause).split())}", "cluster") from None


def deploy(
    config: TurnoutConfig,
    address: str,
    load: PoolLoader = load_engine,
    tell: Tell = silent,
) -> RunningServer:
    """Serve on the connected cluster, with proxies on its nodes; a running application is replaced.

    The application stays when this process ends (`leave`), until `stop`.

    Args:
        config: checked already; the models' folders exist on every node that may host them.
        address: as it was given to `connect`.
        load: as for `deployments.app.build_app`.
        tell: gets a line about each thing that has to be waited for.

    Raises:
        TurnoutError: Serve listens otherwise already, nodes run other code or have another time, no node can host a
            pool, or a pool did not load or found no place in time.
    """
    config = config.model_copy(update={"ray": config.ray.model_copy(update={"address": address})})
    check_behind_proxies(config)
    _check_listening(config)
    check_nodes(this_program())
    check_clocks()
    more = growth(ray.get_runtime_context().gcs_address)
    for line in check_room(config, all_bundles(config), node_offers(), more):
        tell(line)
    if config.kvstore.url == EMBEDDED:
        tell("kvstore.url: an embedded store cannot be reached from a cluster; replicas share no prefixes")
    replaced = APP_NAME in applications()
    try:
        run_app(config, load, ProxyLocation.EveryNode, tell)
    except BaseException:
        if not replaced:  # what failed is not left there to fail again
            with suppress(RayServeException):
                serve.delete(APP_NAME)
        raise
    here = ray.util.get_node_ip_address()
    return RunningServer(
        grpc_address=host_port(here, config.server.grpc_port),
        http_url=http_url(reachable(config.server.http_host, here), config.server.http_port),
        pools=tuple(config.pools),
        grace_s=config.server.shutdown_grace_s,
    )


def leave() -> None:
    """Disconnect from the cluster, which continues to serve."""
    ray.shutdown()


def stop(address: str) -> bool:
    """End the application on a cluster, and Serve with it where it serves nothing else.

    Returns:
        Whether there was one.

    Raises:
        TurnoutError: as `connect`.
    """
    connect(address)
    if not serve_runs():
        return False
    names = set(serve.status().applications)
    if names <= {APP_NAME}:
        serve.shutdown()
    else:
        serve.delete(APP_NAME)
    return APP_NAME in names


def _prepare_environment() -> None:
    """Use the token that is at hand: with an address Ray would not look for one by itself."""
    environment = os.environ  # noqa: TID251 - Ray reads it from nowhere else
    environment.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    named = environment.get("RAY_AUTH_TOKEN") or environment.get("RAY_AUTH_TOKEN_PATH")
    if named or (Path.home() / ".ray" / "auth_token").is_file():
        environment.setdefault("RAY_AUTH_MODE", "token")
    read_authentication_mode()


def _resolve(address: str) -> str:
    try:
        return resolve_address(address)
    except (ConnectionError, ValueError) as error:
        message = (
            f"cluster: {address!r} leads to no cluster ({' '.join(str(error).split())}); give HOST:PORT of its head"
        )
        raise TurnoutError(Code.INVALID_ARGUMENT, message, "cluster") from None


def _probe(place: str) -> None:
    """Ask whether a cluster is there and lets this process in: ray.init takes 20 s to say less."""
    try:
        check_alive(place, PROBE_TIMEOUT_S)
    except grpc.RpcError as error:
        if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            message = (
                f"the cluster at {place} refuses the token of this process, or it has none ({TOKEN_SOURCES}):"
                " use the one that its nodes were started with"
            )
        else:
            message = f"no cluster answers at {place} ({error.code().name})"
        raise TurnoutError(Code.UNAVAILABLE, message, "cluster") from None


def check_listening(config: TurnoutConfig, http: HTTPOptions, rpc: gRPCOptions) -> None:
    """Refuse what Serve, which listens already, would pass over: its proxies stay as they were started.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the field and what Serve has in its place.
    """
    server = config.server
    wanted_s = server.request_timeout_s + BACKSTOP_S
    has_grpc = ADD_TO_SERVER in rpc.grpc_servicer_functions
    differences = [
        ("http_port", server.http_port, http.port),
        ("http_host", server.http_host, http.host),
        ("grpc_port", server.grpc_port, rpc.port if has_grpc else "no port for gRPC"),
    ]
    differences += [
        ("request_timeout_s", server.request_timeout_s, "none" if has_s is None else f"{has_s - BACKSTOP_S:g}")
        for has_s in (http.request_timeout_s, rpc.request_timeout_s)
        if has_s != wanted_s
    ]
    for name, mine, has in differences:
        if mine != has:
            what = "gives requests" if name == "request_timeout_s" else "listens on"
            message = f"Serve {what} {has} on this cluster already: use that, or end it with --stop"
            raise invalid(f"server.{name}", message)


def _check_listening(config: TurnoutConfig) -> None:
    try:
        options = listening(PROBE_TIMEOUT_S)
    except RayError:
        message = f"the controller of Serve does not answer within {PROBE_TIMEOUT_S:g} s; try again"
        raise TurnoutError(Code.UNAVAILABLE, message, "cluster") from None
    if options is not None:
        check_listening(config, *options)
