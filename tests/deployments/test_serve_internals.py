"""What Ray and Serve keep private and the deployments rely on: a version that changes it is named here first."""

from __future__ import annotations

import asyncio
import inspect
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from ray._private import services, state
from ray.serve import context
from ray.serve._private.common import ReplicaState, RequestMetadata
from ray.serve._private.controller import ServeController
from ray.serve._private.handle_options import InitHandleOptions
from ray.serve._private.replica_result import ReplicaResult
from ray.serve.handle import (
    DeploymentBroadcastResponse,
    DeploymentHandle,
    DeploymentResponse,
    DeploymentResponseGenerator,
)
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from deployments import serve_internals

ROOT = Path(serve_internals.__file__).parents[1]
PARAMETERS: list[tuple[Any, str, list[str]]] = [
    (context, "_get_global_client", ["raise_if_no_controller_running"]),
    (state, "actors", []),
    (state, "available_resources_per_node", []),
    (services, "find_node_ids", []),
    (services, "canonicalize_bootstrap_address_or_die", ["addr"]),
    (serve_internals, "init_grpc_channel", ["address"]),
    (RequestRouter, "_get_pending_request_matching_internal_request_id", ["self", "request_metadata"]),
    (RequestRouter, "_fulfill_next_pending_request", ["self", "replica", "request_metadata"]),
    (RequestRouter, "choose_replicas", ["self", "candidate_replicas", "pending_request"]),
    (RequestRouter, "initialize_state", ["self"]),
    (RequestRouter, "on_request_routed", ["self", "pending_request", "replica_id", "result"]),
    (RequestRouter, "on_send_request", ["self", "replica_id"]),
    (RequestRouter, "on_replica_actor_died", ["self", "replica_id"]),
    (RequestRouter, "update_replicas", ["self", "replicas"]),
    (DeploymentHandle, "options", ["stream", "response_serialization"]),
    (DeploymentHandle, "_init", ["kwargs"]),
    (DeploymentBroadcastResponse, "_fetch_replica_results_async", ["self"]),
    (ReplicaResult, "get_async", ["self"]),
    (InitHandleOptions, "__init__", ["_run_router_in_separate_loop"]),
    (RunningReplica, "try_send_request", ["self", "pr", "with_rejection"]),
]


@pytest.mark.parametrize(("owner", "name", "wanted"), PARAMETERS, ids=[name for _, name, _ in PARAMETERS])
def test_private_functions_take_what_they_are_called_with(owner: Any, name: str, wanted: list[str]) -> None:
    found = getattr(owner, name, None)
    assert found is not None, f"ray {version('ray')} has no {name}: adapt deployments/serve_internals.py"
    given = inspect.signature(found).parameters
    missing = [each for each in wanted if each not in given]
    assert not missing, f"{name} of ray {version('ray')} has no parameter {', '.join(missing)}"


def test_private_attributes_are_there() -> None:
    source = inspect.getsource(RequestRouter)
    for name in ("self._pending_requests_to_fulfill", "self._event_loop", "replica_queue_len_cache", "curr_replicas"):
        assert name in source, f"RequestRouter of ray {version('ray')} has no {name}"
    for state_name in ("STARTING", "UPDATING", "RECOVERING", "RUNNING"):
        assert hasattr(ReplicaState, state_name)
    assert {"call_method", "is_streaming", "internal_request_id"} <= set(RequestMetadata.__dataclass_fields__)
    assert {"args", "kwargs", "metadata", "resolved", "routing_context"} <= set(PendingRequest.__dataclass_fields__)
    for method in ("get_grpc_config", "get_serve_instance_details"):
        assert hasattr(_undecorated(ServeController), method)


def _undecorated(kind: Any) -> Any:
    return getattr(getattr(kind, "__ray_metadata__", None), "modified_class", kind)


def test_no_other_module_of_the_deployments_uses_private_names_of_ray() -> None:
    words = ("ray._private", "ray._raylet", "ray._common", "ray.serve._private", "ray.core.generated")
    sources = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "deployments").rglob("*.py")}
    found = {name for name, text in sources.items() if any(f"from {word}" in text for word in words)}
    found |= {name for name, text in sources.items() if "_get_global_client" in text}
    assert found == {"serve_internals.py"}


def test_an_address_without_a_cluster_is_refused() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        serve_internals.resolve_address("nowhere")


def test_a_handle_without_a_router_has_no_request_router() -> None:
    assert serve_internals.request_router(object()) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [DeploymentResponse, DeploymentResponseGenerator])
async def test_a_call_that_is_cancelled_as_it_reaches_a_replica_is_cancelled_there(kind: Any) -> None:
    class Reached:
        cancelled = False

        def cancel(self) -> None:
            self.cancelled = True

    choice: asyncio.Future[Reached] = asyncio.get_running_loop().create_future()
    response = kind(choice, None, _is_router_running_in_separate_loop=False)

    async def read() -> None:
        try:
            await (response if kind is DeploymentResponse else anext(response))
        except asyncio.CancelledError:
            serve_internals.cancel(response)
            raise

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    choice.set_result(Reached())
    reading.cancel()
    await asyncio.wait([reading])
    assert reading.cancelled()
    assert choice.result().cancelled


class Replica:
    """One of those that are asked; without an answer it hangs."""

    def __init__(self, answer: Any = None) -> None:
        self._answer = answer

    async def get_async(self) -> Any:
        if self._answer is None:
            await asyncio.Event().wait()
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


class Asked:
    def __init__(self, *replicas: Replica, hangs: bool = False) -> None:
        self._replicas, self._hangs = replicas, hangs

    async def _fetch_replica_results_async(self) -> list[Replica]:
        if self._hangs:
            await asyncio.Event().wait()
        return list(self._replicas)


async def test_a_replica_that_hangs_or_fails_leaves_the_answers_of_the_others() -> None:
    asked: Any = Asked(Replica("a"), Replica(), Replica(RuntimeError("gone")), Replica("b"))
    assert await serve_internals.answers_of_all(asked, 0.05) == ["a", "b"]
    silent: Any = Asked()
    assert await serve_internals.answers_of_all(silent, 0.05) == []
    unreached: Any = Asked(hangs=True)
    assert await serve_internals.answers_of_all(unreached, 0.05) == []
