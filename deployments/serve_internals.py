"""Adapter of everything that Ray and Serve keep private and the deployments rely on.

Other modules of `deployments` import none of it. `tests/deployments/test_serve_internals.py` names what a new version
of Ray changed. It also checks the base class of `deployments.replica_choice.PrefixRouter`, whose overrides stay in that
module: Serve pickles it by value.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray._common.network_utils import is_ipv6
from ray._private import services, state
from ray._private.grpc_utils import init_grpc_channel
from ray._raylet import Config as _NativeConfig  # type: ignore[attr-defined]
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
from ray.serve._private.common import ReplicaState
from ray.serve.config import HTTPOptions, gRPCOptions
from ray.serve.context import _get_global_client
from ray.serve.handle import (
    DeploymentBroadcastResponse,
    DeploymentHandle,
    DeploymentResponse,
    DeploymentResponseGenerator,
)

__all__ = ["ReplicaState", "is_ipv6"]


def read_authentication_mode() -> None:
    """Have Ray read its authentication mode from the environment again: it did so when it was imported."""
    _NativeConfig.initialize("")


def serve_runs() -> bool:
    """Return whether Serve's controller runs on the cluster that this process is connected to."""
    return _get_global_client(raise_if_no_controller_running=False) is not None


def listening(timeout_s: float) -> tuple[HTTPOptions, gRPCOptions] | None:
    """Return the options that Serve's proxies were started with; None: Serve does not run.

    Raises:
        ray.exceptions.RayError: the controller does not answer in time.
    """
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return None
    return client.http_config, ray.get(client._controller.get_grpc_config.remote(), timeout=timeout_s)


def served_applications(timeout_s: float) -> set[str]:
    """Return the names of what Serve serves or ends. `serve.status` says it too, but waits for ever.

    Raises:
        ray.serve.exceptions.RayServeException: Serve does not run.
        ray.exceptions.RayError: the controller does not answer in time.
    """
    controller = _get_global_client()._controller
    details = ray.get(controller.get_serve_instance_details.remote(), timeout=timeout_s)
    return set(details["applications"])


def wait_for_proxies() -> None:
    """Wait until Serve's proxies answer.

    Raises:
        TimeoutError: Serve gave up.
    """
    _get_global_client().wait_for_proxies_serving()


def request_router(handle: DeploymentHandle) -> Any:
    """Return the request router of a handle in this process; None before its first call."""
    return getattr(getattr(getattr(handle, "_router", None), "_asyncio_router", None), "request_router", None)


def route_in_this_loop(handle: DeploymentHandle) -> None:
    """Have the calls of a new handle routed and read in the event loop that runs, not in a thread of Serve's.

    There each item of a stream would wait for another thread, and Serve would read streams ahead of a slow reader.
    """
    handle._init(_run_router_in_separate_loop=False)


def cancel(response: DeploymentResponse | DeploymentResponseGenerator) -> None:
    """Cancel a call, also in the replica that it has just reached.

    Where handles are routed in the caller's loop, Serve forgets a replica whose choice the caller has not yet seen.
    """
    response.cancel()
    choice = getattr(response, "_replica_result_future", None)
    if choice is not None and choice.done() and not choice.cancelled() and choice.exception() is None:
        choice.result().cancel()


async def answers_of_all(asked: DeploymentBroadcastResponse, timeout_s: float) -> list[Any]:
    """Return what those replicas answer that do in time; of Serve's own `results_async`, one that hangs leaves nothing.

    Args:
        asked: of all replicas.
        timeout_s: seconds that they have.
    """
    until = asyncio.get_running_loop().time() + timeout_s
    try:
        async with asyncio.timeout_at(until):
            replicas = await asked._fetch_replica_results_async()
    except TimeoutError:
        return []
    answers = [asyncio.ensure_future(each.get_async()) for each in replicas]
    if answers:
        _, late = await asyncio.wait(answers, timeout=until - asyncio.get_running_loop().time())
        for each in late:
            each.cancel()
    return [each.result() for each in answers if each.done() and not each.cancelled() and each.exception() is None]


def free_resources() -> list[dict[str, float]]:
    """Return what each live node of the cluster has free now."""
    nodes = state.available_resources_per_node().values()
    return [{str(name): float(amount) for name, amount in node.items()} for node in nodes]


def actor_states() -> list[tuple[str, str]]:
    """Return name and state of each actor of the cluster, in Ray's words."""
    return [(str(each["Name"]), str(each["State"])) for each in state.actors().values()]


def is_a_node() -> bool:
    """Return whether a node of a cluster runs on this machine."""
    return bool(services.find_node_ids())


def resolve_address(address: str) -> str:
    """Return HOST:PORT of the head that an address, or "auto", means.

    Raises:
        ConnectionError: it means none.
        ValueError: it is no address.
    """
    return str(services.canonicalize_bootstrap_address_or_die(address))


def check_alive(address: str, timeout_s: float) -> None:
    """Ask the head of a cluster whether it runs and accepts this process's token.

    Raises:
        grpc.RpcError: it does not.
    """
    with init_grpc_channel(address) as channel:
        stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        stub.CheckAlive(gcs_service_pb2.CheckAliveRequest(), timeout=timeout_s)
