"""What is refused before anything is deployed on a cluster: pools that no node can host, nodes that run other code."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
import yaml
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import turnout
from actors import placement
from turnout.config import PoolConfig, TurnoutConfig
from turnout.errors import Code, TurnoutError
from turnout.sources import sources_digest

REPORT_TIMEOUT_S = 60.0
HEAD_MARK = "node:__internal_head__"
UNBOUNDED = 1e9  # nodes, where an autoscaler has no limit

Resources = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Program:
    """What a process runs. Two that differ must not work on one request.

    Attributes:
        turnout: version of this program.
        code: digest of its sources.
        python: version.
        ray: version.
        torch: version; "" where it is not installed.
    """

    turnout: str
    code: str
    python: str
    ray: str
    torch: str


@dataclass(frozen=True, slots=True)
class NodeType:
    """Nodes that the cluster's autoscaler may add: what each offers, and how many there may be (-1: any number)."""

    name: str
    resources: Resources
    most: int


@dataclass(frozen=True, slots=True)
class Growth:
    """What the cluster's autoscaler may add: nodes of these types, and how many of all together (-1: any number)."""

    types: tuple[NodeType, ...]
    most: int = -1

    @property
    def addable(self) -> tuple[NodeType, ...]:
        """Types of which there may be any."""
        return tuple(each for each in self.types if each.most != 0 and self.most != 0)

    def total(self, name: str) -> float:
        """The most of a resource that all nodes together may have."""
        left, total = _number(self.most), 0.0
        for amount, most in sorted(((each.resources.get(name, 0.0), each.most) for each in self.types), reverse=True):
            added = min(_number(most), left)
            total += added * amount
            left -= added
        return total


def _number(most: int) -> float:
    return most if most >= 0 else UNBOUNDED


def this_program() -> Program:
    """What this process runs. Neither torch nor a model is loaded for it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    return Program(turnout.__version__, sources_digest(), platform.python_version(), ray.__version__, torch)


def live_nodes() -> list[dict[str, object]]:
    """Ray's records of the cluster's live nodes."""
    return [node for node in ray.nodes() if node["Alive"]]


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
            raise _unfit(address, f"does not answer within {REPORT_TIMEOUT_S:g} s")
        try:
            theirs = ray.get(reference)
        except Exception as error:
            raise _unfit(address, f"cannot run this program: {_reason(error)}") from None
        compare(address, theirs, mine)


def compare(address: str, theirs: Program, mine: Program) -> None:
    """Refuse a node that runs anything else.

    Raises:
        TurnoutError: UNAVAILABLE, naming the node, what differs, and what to do.
    """
    for name, value in asdict(mine).items():
        other = getattr(theirs, name)
        if other != value:
            what = "sources of Turnout" if name == "code" else f"{name} {other or 'none'}"
            here = "others than" if name == "code" else f"not {value or 'none'} as"
            raise _unfit(address, f"has {what}, {here} this one: bring all nodes to one state (`ray up` copies yours)")


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _unfit(address: str, what: str) -> TurnoutError:
    return TurnoutError(Code.UNAVAILABLE, f"node {address} {what}")


def growth(gcs_address: str) -> Growth | None:
    """What the cluster's autoscaler may add, as the file says that its head was started with; None: it has none.

    Args:
        gcs_address: HOST:PORT of the head.

    Raises:
        TurnoutError: UNAVAILABLE: the head is not there, or cannot be asked.
    """
    heads = [node for node in live_nodes() if HEAD_MARK in dict(node["Resources"])]  # type: ignore[call-overload]
    if len(heads) != 1:
        raise TurnoutError(Code.UNAVAILABLE, "no node of the cluster is its head at the moment: start it again")
    (head,) = heads
    there = NodeAffinitySchedulingStrategy(str(head["NodeID"]), soft=False)
    read = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(autoscaler_file)
    try:
        config = ray.get(read.remote(gcs_address), timeout=REPORT_TIMEOUT_S)
    except GetTimeoutError:
        raise _unfit(str(head["NodeManagerAddress"]), f"does not answer within {REPORT_TIMEOUT_S:g} s") from None
    except RayError as error:
        what = f"cannot read the file of its autoscaler: {_reason(error)}"
        raise _unfit(str(head["NodeManagerAddress"]), what) from None
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


def check_room(
    config: TurnoutConfig,
    bundles: Mapping[str, Sequence[Resources]],
    nodes: Sequence[Resources],
    more: Growth | None,
) -> list[str]:
    """Refuse pools that the cluster can never host, busy or not.

    Args:
        config: whose pools are to be served.
        bundles: what one replica of each pool asks for.
        nodes: what each live node offers in all.
        more: what an autoscaler may add; None: the nodes are all there will be.

    Returns:
        One line for each pool that has to wait for nodes to be added.

    Raises:
        TurnoutError: UNAVAILABLE, naming the pool, what it needs and what there is.
    """
    waiting = []
    for name, pool in config.pools.items():
        wanted = _alone(pool, bundles[name])
        try:
            placement.check_hosts(name, wanted, nodes)
            _check_spread(name, pool, len(bundles[name]), len(nodes))
        except TurnoutError:
            if more is None:
                raise
            placement.check_hosts(name, wanted, [*nodes, *(each.resources for each in more.addable)])
            waiting.append(f"pool {name!r} waits for nodes that the autoscaler adds")
    short = _shortage(config, bundles, nodes, more)
    if short is not None:
        raise short
    if not waiting and more is not None and _shortage(config, bundles, nodes, None) is not None:
        waiting.append("some replicas wait for nodes that the autoscaler adds")
    return waiting


def _alone(pool: PoolConfig, bundles: Sequence[Resources]) -> list[Resources]:
    """What must lie on one node, for each node."""
    if pool.placement.strategy != "STRICT_PACK":
        return list(bundles)
    return [_total(bundles, 1)]


def _check_spread(name: str, pool: PoolConfig, wanted: int, nodes: int) -> None:
    if pool.placement.strategy == "STRICT_SPREAD" and wanted > nodes:
        message = (
            f"pool {name!r} needs {wanted} nodes for a replica (STRICT_SPREAD); there are {nodes}: add nodes, or change"
            f" pools.{name}.placement.strategy"
        )
        raise TurnoutError(Code.UNAVAILABLE, message, f"pools.{name}.placement.strategy")


def _total(bundles: Sequence[Resources], times: float) -> dict[str, float]:
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + times * amount
    return total


def _shortage(
    config: TurnoutConfig,
    bundles: Mapping[str, Sequence[Resources]],
    nodes: Sequence[Resources],
    more: Growth | None,
) -> TurnoutError | None:
    """The refusal of pools that fit one by one, but not all at the same time."""
    wanted: dict[str, float] = {}
    for name, pool in config.pools.items():
        fewest = pool.replicas if pool.autoscaling is None else pool.autoscaling.min_replicas
        wanted = _total([wanted, _total(bundles[name], fewest)], 1)
    # Nodes that an autoscaler has added count among those it may add.
    there = _total(nodes, 1)
    for name, amount in sorted(wanted.items()):
        most = max(there.get(name, 0.0), 0.0 if more is None else more.total(name))
        if amount > most:
            message = (
                f"the pools need {name}: {amount:g} for all their replicas; the cluster has {most:g}:"
                " add nodes, or lower pools.*.replicas"
            )
            return TurnoutError(Code.UNAVAILABLE, message, "pools")
    return None
