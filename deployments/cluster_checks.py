"""What is asked of a cluster's nodes before anything is deployed: what they run, what they offer, what may be added."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import ray
import yaml
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.build_info import Program, compare, this_program, unfit
from deployments.placement_check import HEAD_MARK, Growth, NodeType, Resources
from turnout.errors import Code, TurnoutError

REPORT_TIMEOUT_S = 60.0
# Half of what tokens are given by default (access.jwt.leeway_s): two nodes may differ from this one in both directions.
MOST_APART_S = 5.0
CLOCK_TRIES = 3  # the first one may wait for a process to start
ROUND_TRIP_S = 0.5  # that is short enough to tell


def live_nodes() -> list[dict[str, Any]]:
    """Ray's records of the cluster's live nodes."""
    return [node for node in ray.nodes() if node["Alive"]]


def node_offers() -> list[Resources]:
    """What each live node has in all, busy or not."""
    return [{str(name): float(amount) for name, amount in node["Resources"].items()} for node in live_nodes()]


def check_nodes(mine: Program) -> None:
    """Ask every live node what it runs.

    Raises:
        TurnoutError: UNAVAILABLE, naming the node and what differs, or that it cannot run this program at all.
    """
    report = ray.remote(num_cpus=0, max_retries=0)(this_program)
    asked = {}
    for node in live_nodes():
        there = NodeAffinitySchedulingStrategy(str(node["NodeID"]), soft=False)
        asked[report.options(scheduling_strategy=there).remote()] = str(node["NodeManagerAddress"])
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=REPORT_TIMEOUT_S)
    for reference, address in asked.items():
        if reference not in done:
            raise unfit(address, f"does not answer within {REPORT_TIMEOUT_S:g} s")
        try:
            theirs = ray.get(reference)
        except Exception as error:
            raise unfit(address, f"cannot run this program: {_reason(error)}") from None
        compare(address, theirs, mine)


def check_clocks() -> None:
    """Compare the clock of every live node with this machine's.

    Raises:
        TurnoutError: UNAVAILABLE, naming the node, how far its clock is off, and what to do.
    """
    read = ray.remote(num_cpus=0, max_retries=0)(clock)
    for node in live_nodes():
        there = NodeAffinitySchedulingStrategy(str(node["NodeID"]), soft=False)
        address = str(node["NodeManagerAddress"])
        offs: list[float] = []
        took_s = math.inf
        while len(offs) < CLOCK_TRIES and took_s > ROUND_TRIP_S:
            before = time.time()
            try:
                theirs = ray.get(read.options(scheduling_strategy=there).remote(), timeout=REPORT_TIMEOUT_S)
            except RayError as error:
                raise unfit(address, f"does not tell its time: {_reason(error)}") from None
            took_s = time.time() - before
            offs.append(off_by(theirs, before, before + took_s))
        off = max(offs, key=abs)
        if abs(off) > MOST_APART_S:
            what = f"has a clock that is {abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} this machine's"
            remedy = f"at most {MOST_APART_S:g} s are taken: let NTP or chrony set both, and serve again"
            raise unfit(address, f"{what}, so that tokens and certificates hold on one and not on the other; {remedy}")


def clock() -> float:
    """Seconds since 1970, as this machine thinks."""
    return time.time()


def off_by(theirs: float, before: float, after: float) -> float:
    """By how much a clock is off at least: read somewhere between two readings of this machine's, all in seconds."""
    return max(theirs - after, 0.0) - max(before - theirs, 0.0)


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def growth(gcs_address: str) -> Growth | None:
    """What the cluster's autoscaler may add, as the file says that its head was started with; None: it has none.

    Args:
        gcs_address: HOST:PORT of the head.

    Raises:
        TurnoutError: UNAVAILABLE: the head is not there, or cannot be asked.
    """
    heads = [node for node in live_nodes() if HEAD_MARK in node["Resources"]]
    if len(heads) != 1:
        raise TurnoutError(Code.UNAVAILABLE, "no node of the cluster is its head at the moment: start it again")
    (head,) = heads
    there = NodeAffinitySchedulingStrategy(str(head["NodeID"]), soft=False)
    read = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(autoscaler_file)
    try:
        config = ray.get(read.remote(gcs_address), timeout=REPORT_TIMEOUT_S)
    except GetTimeoutError:
        raise unfit(str(head["NodeManagerAddress"]), f"does not answer within {REPORT_TIMEOUT_S:g} s") from None
    except RayError as error:
        what = f"cannot read the file of its autoscaler: {_reason(error)}"
        raise unfit(str(head["NodeManagerAddress"]), what) from None
    if config is None:
        return None
    most = config.get("max_workers", -1)
    types = [
        NodeType(name, each.get("resources", {}), each.get("max_workers", most))
        for name, each in config["available_node_types"].items()
    ]
    return Growth(tuple(types), most)


def autoscaler_file(gcs_address: str) -> dict[str, Any] | None:
    """The cluster file of the autoscaler that runs on this machine for this cluster; None where none runs."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any(word.endswith("monitor.py") for word in words) and f"--gcs-address={gcs_address}" in words:
            for word in words:
                if word.startswith("--autoscaling-config="):
                    text = Path(word.partition("=")[2]).expanduser().read_text(encoding="utf-8")
                    return dict(yaml.safe_load(text))
    return None
