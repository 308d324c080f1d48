"""What the replicas of a pool agree on: the program they run and the models they loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ray import serve
from ray.experimental import internal_kv as kv
from ray.serve._private.common import ReplicaState
from ray.serve.context import _get_global_client
from ray.serve.schema import DeploymentStatus, DeploymentStatusOverview

from deployments.program import Program, compare, this_program
from turnout.config import TurnoutConfig
from turnout.errors import Code, TurnoutError

NAMESPACE = "turnout"
STARTING = (ReplicaState.STARTING, ReplicaState.UPDATING, ReplicaState.RECOVERING)
ON_ITS_WAY = (DeploymentStatus.UPDATING, DeploymentStatus.UPSCALING)


@dataclass(frozen=True, slots=True)
class Origin:
    """What a replica's deployment was made with.

    Attributes:
        version: as Serve knows it; replicas of one version run the same models.
        program: of the process that deployed it.
    """

    version: str
    program: Program

    def check_program(self, address: str) -> None:
        """Refuse to be a replica beside others of another program: nodes come when nobody looks at them any more.

        Args:
            address: of this node.

        Raises:
            TurnoutError: UNAVAILABLE, naming the node, what differs, and what to do.
        """
        compare(address, this_program(), self.program, "the process that deployed this pool")


def begin(application: str, versions: Mapping[str, str]) -> None:
    """Before an application is deployed: forget which models its pools had, but where replicas run and stay.

    Args:
        application: its name in Serve.
        versions: of its pools, by name, as they are to be.
    """
    there = _running(application)
    for pool, version in versions.items():
        prefix = f"{application}/{pool}/"
        before = _get(f"{prefix}version") if f"pool-{pool}" in there else None
        kept = {f"{prefix}version", f"{prefix}models/{before}"}
        for key in kv._internal_kv_list(prefix, namespace=NAMESPACE):
            if key.decode() not in kept:
                kv._internal_kv_del(key, namespace=NAMESPACE)
        kv._internal_kv_put(f"{prefix}version", version, overwrite=True, namespace=NAMESPACE)


def unsettled(application: str) -> dict[str, int]:
    """Replicas that are starting now, or soon will be, by pool; none where a pool is settled or not there.

    What of them fails after another version was deployed Serve takes for a failure of that version, and ends its
    rollout for good.

    Args:
        application: its name in Serve.
    """
    found = {}
    for name, deployment in _deployments(application).items():
        starting = sum(deployment.replica_states.get(state, 0) for state in STARTING)
        if starting or deployment.status in ON_ITS_WAY:  # between two tries nothing starts
            found[name.removeprefix("pool-")] = max(starting, 1)
    return found


def _running(application: str) -> set[str]:
    """Deployments that have replicas."""
    found = _deployments(application).items()
    return {name for name, each in found if each.replica_states.get(ReplicaState.RUNNING, 0)}


def _deployments(application: str) -> Mapping[str, DeploymentStatusOverview]:
    if _get_global_client(raise_if_no_controller_running=False) is None:
        return {}
    status = serve.status().applications.get(application)
    return status.deployments if status is not None else {}


def agree(
    application: str, pool: str, version: str, digests: Mapping[str, str], place: str, config: TurnoutConfig
) -> None:
    """Be the first replica of a version to say which models it has loaded, or have the same as that one.

    Args:
        application: its name in Serve.
        pool: the pool's name.
        version: of its deployment.
        digests: of the models, by name.
        place: node and process of this replica.
        config: says where the models lie.

    Raises:
        TurnoutError: UNAVAILABLE, naming the node, the path, both digests and what to do.
    """
    key = f"{application}/{pool}/models/{version}"
    kv._internal_kv_put(key, json.dumps({"place": place, "digests": dict(digests)}), False, namespace=NAMESPACE)
    first = json.loads(_get(key) or "null")
    if first is None:  # the application is deployed anew at this moment, and this replica is to go
        return
    for name, digest in digests.items():
        if first["digests"].get(name) != digest:
            theirs = f"{first['place']} loaded one with {first['digests'].get(name)}"
            path = config.models[name].path
            message = (
                f"node {place}: model {name!r} at {path} has the digest {digest}, and {theirs}: put the same checkpoint"
                f" on every node; a new one needs a folder of its own, named in models.{name}.path, or the application"
                " stopped and served again"
            )
            raise TurnoutError(Code.UNAVAILABLE, message, f"models.{name}.path")


def _get(key: str) -> str | None:
    value = kv._internal_kv_get(key, namespace=NAMESPACE)
    return value.decode() if value is not None else None
