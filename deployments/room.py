"""Pools that the nodes there are, and those that may be added, can never host: refused before anything is deployed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from actors import placement
from deployments.placement_check import Growth, Misfit, Replica, Resources, fit, refusal, sum_of
from turnout.config import PoolConfig, TurnoutConfig
from turnout.errors import Code, TurnoutError


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
        One line for each pool that has to wait for nodes to be added, and for what could not be found out.

    Raises:
        TurnoutError: UNAVAILABLE, naming the pool, what it needs, which resource is short, and what there is.
    """
    left = None if more is None else more.beyond(nodes)
    hosts = [*nodes, *(each.resources for each in (left.addable if left is not None else ()))]
    waiting, unknown, wanted = [], list[str](), list[Replica]()
    for name, pool in config.pools.items():
        replica = Replica(name, tuple(bundles[name]), pool.placement.strategy)
        placement.check_hosts(name, replica.pieces, hosts)
        _check_spread(replica, len(nodes), 0 if left is None else left.count)
        unknown += _check_fit([replica], nodes, left)
        if left is not None and fit([replica], nodes) is not None:
            waiting.append(f"pool {name!r} waits for nodes that the autoscaler adds")
        wanted += [replica] * _fewest(pool)
    short = _shortage(wanted, nodes, more)
    if short is not None:
        raise short
    unknown += _check_fit(wanted, nodes, left)
    if not waiting and left is not None and fit(wanted, nodes) is not None:
        waiting.append("some replicas wait for nodes that the autoscaler adds")
    return waiting + list(dict.fromkeys(unknown))


def _fewest(pool: PoolConfig) -> int:
    return pool.replicas if pool.autoscaling is None else pool.autoscaling.min_replicas


def _check_spread(replica: Replica, nodes: int, more: int) -> None:
    wanted = len(replica.bundles)
    if replica.strategy == "STRICT_SPREAD" and wanted > nodes + more:
        field = f"pools.{replica.pool}.placement.strategy"
        added = f", and {more} may be added" if more else ""
        message = (
            f"pool {replica.pool!r} needs {wanted} nodes for a replica (STRICT_SPREAD); there are {nodes}{added}:"
            f" add nodes, or change {field}"
        )
        raise TurnoutError(Code.UNAVAILABLE, message, field)


def _check_fit(wanted: Sequence[Replica], nodes: Sequence[Resources], left: Growth | None) -> list[str]:
    misfit = fit(wanted, nodes, left)
    if misfit is None:
        return []
    if misfit.proven:
        raise refusal(misfit, nodes, left is not None)
    return [_unknown(misfit)]


def _unknown(misfit: Misfit) -> str:
    return f"pool {misfit.pool!r}: whether there is room for all bundles at the same time was not found out"


def _shortage(wanted: Sequence[Replica], nodes: Sequence[Resources], more: Growth | None) -> TurnoutError | None:
    """The refusal of pools that fit one by one, but not all at the same time."""
    # Nodes that an autoscaler has added count among those it may add.
    there = sum_of(nodes)
    for name, amount in sorted(sum_of([sum_of(replica.bundles) for replica in wanted]).items()):
        most = max(there.get(name, 0.0), 0.0 if more is None else more.total(name))
        if amount > most:
            message = (
                f"the pools need {name}: {amount:g} for all their replicas; the cluster has {most:g}:"
                " add nodes, or lower pools.*.replicas"
            )
            return TurnoutError(Code.UNAVAILABLE, message, "pools")
    return None
