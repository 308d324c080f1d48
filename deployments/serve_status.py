"""State of the applications that Serve serves; empty where no Serve runs."""

from __future__ import annotations

from collections.abc import Mapping

import ray
from ray import serve
from ray.serve.schema import ApplicationStatusOverview, DeploymentStatus, DeploymentStatusOverview

from deployments.serve_internals import ReplicaState, serve_runs

STARTING = (ReplicaState.STARTING, ReplicaState.UPDATING, ReplicaState.RECOVERING)
ON_ITS_WAY = (DeploymentStatus.UPDATING, DeploymentStatus.UPSCALING)


def applications() -> Mapping[str, ApplicationStatusOverview]:
    """Those of the cluster this process is connected to, by name."""
    # Asked by a process that is connected to none, Serve would start a Ray of its own.
    if not ray.is_initialized() or not serve_runs():
        return {}
    found: Mapping[str, ApplicationStatusOverview] = serve.status().applications
    return found


def running_pools(application: str) -> set[str]:
    """Pools of an application that have running replicas."""
    found = _pools(application).items()
    return {name for name, each in found if each.replica_states.get(ReplicaState.RUNNING, 0)}


def unsettled_pools(application: str) -> dict[str, int]:
    """By pool, how many replicas of an application are starting now or soon will be; where none are, it is left out.

    A failure of theirs that Serve hears of when another version is wanted already counts as that version's, and ends
    its rollout for good.
    """
    found = {}
    for name, pool in _pools(application).items():
        starting = sum(pool.replica_states.get(state, 0) for state in STARTING)
        if starting or pool.status in ON_ITS_WAY:  # between two tries nothing starts
            found[name] = max(starting, 1)
    return found


def _pools(application: str) -> dict[str, DeploymentStatusOverview]:
    status = applications().get(application)
    found = status.deployments.items() if status is not None else ()
    return {name.removeprefix("pool-"): each for name, each in found if name.startswith("pool-")}
