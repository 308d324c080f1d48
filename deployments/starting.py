"""Running the application until it answers: what it waits for is said, and a standstill ends by a deadline."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

from ray import serve
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
)
from ray.util import placement_group_table

from actors import placement
from deployments.placement_check import Replica, fit
from deployments.pool_options import replica_bundles
from deployments.serve_internals import ReplicaState, actor_states, free_resources, wait_for_proxies
from turnout.config import TurnoutConfig
from turnout.errors import Code, TurnoutError

EXCEPTION_LINE = re.compile(r"[A-Za-z_][\w.]*(Error|Exception): ")
POLL_S = 0.2
TELL_S = 10.0  # between two lines about what is waited for
FIELD = "ray.start_timeout_s"
UNBORN = frozenset({"DEPENDENCIES_UNREADY", "PENDING_CREATION"})  # actors without a process, in Ray's words

Tell = Callable[[str], None]


def silent(line: str) -> None:
    """Ignore a line."""


def run_until_up(target: serve.RunTarget, config: TurnoutConfig, tell: Tell = silent) -> None:
    """Serve an application, or another state of one, and return when it answers.

    Args:
        target: made from `config`, as `deployments.app.build_app` does.
        config: says how long the start may stand still.
        tell: gets a line about what is waited for, again and again.

    Raises:
        TurnoutError: UNAVAILABLE: a replica failed to start, or nothing changed for `ray.start_timeout_s`; it says what
            is missing.
    """
    serve.run_many([target], wait_for_applications_running=False)
    _wait(target.name, config, tell)
    try:
        wait_for_proxies()
    except TimeoutError as error:
        raise _failed(f"its pools run, but Serve says: {error}") from None


def _wait(name: str, config: TurnoutConfig, tell: Tell) -> None:
    moved = last_line = time.monotonic()
    last: dict[str, int] | None = None
    while True:
        status = serve.status().applications.get(name)
        if status is None:
            raise _failed("another process has ended it")
        if status.status is ApplicationStatus.RUNNING:
            return
        if status.status is ApplicationStatus.DEPLOY_FAILED:
            raise _failed(_reason(status))
        now, running = time.monotonic(), _running(status)
        if running != last:
            moved, last = now, running
        if now - moved > config.ray.start_timeout_s:
            what = "; ".join(_missing(name, status, config)) or status.message or status.status.value
            raise _failed(f"nothing has changed for {config.ray.start_timeout_s:g} s ({FIELD}): {what}", FIELD)
        if now - last_line > TELL_S:
            last_line = now
            for line in _missing(name, status, config):
                tell(f"waiting: {line}")
        time.sleep(POLL_S)


def _failed(reason: str, field: str | None = None) -> TurnoutError:
    return TurnoutError(Code.UNAVAILABLE, f"the application did not start: {reason}", field)


def _running(status: ApplicationStatusOverview) -> dict[str, int]:
    """Replicas that fail and are started again are no change."""
    return {name: each.replica_states.get(ReplicaState.RUNNING, 0) for name, each in status.deployments.items()}


def _reason(status: ApplicationStatusOverview) -> str:
    """Why a replica did not start."""
    for name, deployment in status.deployments.items():
        if fault := _fault(deployment):
            return f"{name}: {fault}"
    return str(status.message)


def _fault(deployment: DeploymentStatusOverview) -> str:
    """The last line of the traceback that Serve keeps as a deployment's status; empty where there is none."""
    lines = [line.strip() for line in deployment.message.splitlines() if EXCEPTION_LINE.match(line.strip())]
    return lines[-1].removeprefix("turnout.errors.TurnoutError: ") if lines else ""


def _missing(name: str, status: ApplicationStatusOverview, config: TurnoutConfig) -> Iterator[str]:
    """A line for each deployment that is not as it is meant to be."""
    for each, deployment in status.deployments.items():
        if deployment.status is DeploymentStatus.HEALTHY:
            continue
        pool = each.removeprefix("pool-")
        if pool == each:
            yield f"the {each} starts"
        else:
            settings = config.pools[pool]
            replica = Replica(pool, tuple(replica_bundles(config, settings)), settings.placement.strategy)
            yield f"pool {pool!r}: {_awaited(_homeless(name, each), deployment, replica)}"


def _awaited(homeless: int, deployment: DeploymentStatusOverview, replica: Replica) -> str:
    counts = {state.lower(): count for state, count in deployment.replica_states.items()}
    counted = "replicas " + (", ".join(f"{state}: {count}" for state, count in counts.items() if count) or "not begun")
    if fault := _fault(deployment):
        return f"{counted}; the last one that failed: {fault}"
    if not homeless:
        return f"{counted}; those that start load their models: see their logs, or raise {FIELD}"
    unplaced = fit([replica], free_resources())
    if unplaced is None:
        return f"{counted}; {homeless} of them wait for a process: see `ray status`, or raise {FIELD}"
    asked = " and ".join(placement.shown(bundle) for bundle in replica.bundles)
    return (
        f"{counted}; {homeless} of them found no free place for {asked} ({replica.strategy}): among what is free"
        f" {unplaced.short}; others have it (see `ray status`), or no node offers it yet: free it, add nodes, or change"
        f" pools.{replica.pool}.placement"
    )


def _homeless(application: str, deployment: str) -> int:
    """Replicas that no node has taken in."""
    prefix = f"SERVE_REPLICA::{application}#{deployment}#"
    placed = {group["name"] for group in placement_group_table().values() if group["state"] == "CREATED"}
    waiting = {name for name, state in actor_states() if state in UNBORN}
    return sum(name.startswith(prefix) for name in waiting - placed)
