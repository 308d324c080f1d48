"""Queueing theory without a simulation; the simulator is checked against it, and it names what saturates.

M/D/1 is the Pollaczek-Khinchine formula for a constant service time; the bounds are those of operational analysis: no
part does more than one second of work in a second.
"""

from __future__ import annotations

from math import ceil, inf

from benchmarks.scaling.cluster import Layout, controller_cores
from benchmarks.scaling.costs import Costs


def md1_wait(rate: float, service_s: float) -> float:
    """Mean time before service begins, in seconds: Poisson arrivals, a constant service time, one server.

    Raises:
        ValueError: more arrives than can be served.
    """
    load = rate * service_s
    if load >= 1.0:
        raise ValueError(f"the load must be below 1 (got {load:g})")
    return load * service_s / (2.0 * (1.0 - load))


def plain_rate(costs: Costs, prompt: int, answer: int) -> float:
    """Tokens a second of one pool that answers one request after the other with its large model alone."""
    times, pair = costs.pair.large.times(), costs.pair
    seconds = pair.step_s + pair.row_s + times.seconds(prompt, prompt * (prompt + 1) // 2, 1)
    for place in range(1, answer):
        seconds += pair.step_s + pair.row_s + times.seconds(1, prompt + place, 1)
    return answer / seconds


def front_bound(costs: Costs, layout: Layout, pools: int, items: float) -> dict[str, float]:
    """Requests a second that each part before the pools can carry at most; 0.0: it is busy with other things only.

    Args:
        costs: of everything.
        layout: what stands before the pools.
        pools: how many.
        items: pieces in which a request's answer is passed on.
    """
    cell = layout.in_cell(pools)
    cells = ceil(pools / cell)
    looked = min(layout.candidates or cell, cell)
    request_s = costs.ingress.request_s + items * costs.ingress.chunk_s
    request_s += costs.choice.base_s + looked * costs.choice.per_replica_s
    period_s = costs.control.stats_period_s * max(controller_cores(costs, layout, pools), 1.0)
    free = max(1.0 - cell * costs.choice.hear_s / period_s, 0.0)
    proxy_s = costs.proxy.request_s + items * costs.proxy.chunk_s
    return {
        "ingress": cells * layout.ingresses(pools) * free / request_s if request_s else inf,
        "proxy": pools / proxy_s if proxy_s else inf,
    }


def control_bytes_per_s(costs: Costs, layout: Layout, pools: int) -> float:
    """Bytes a second that a cluster's controller sends to those that choose."""
    return (
        layout.in_cell(pools)
        * layout.ingresses(pools)
        * costs.control.stats_bytes
        / (costs.control.stats_period_s * max(controller_cores(costs, layout, pools), 1.0))
    )
