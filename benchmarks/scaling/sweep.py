"""Growth of a cluster: layouts by numbers of pools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from benchmarks.scaling.closed_forms import control_bytes_per_s, front_bound
from benchmarks.scaling.cluster import Cluster, Figures, Layout, Traffic
from benchmarks.scaling.costs import Choice, Control, Costs, Observed, Work

POOLS = (1, 4, 16, 64, 256, 1024, 4096)
LAYOUTS = (
    Layout("as shipped: one ingress"),
    Layout("an ingress for 2 pools", pools_per_ingress=2),
    Layout("and 16 candidates", pools_per_ingress=2, candidates=16),
    Layout("and cells of 256 pools", pools_per_ingress=2, candidates=16, cell=256),
)
TRAFFIC = Traffic(prompt=96, answer=64, shared=256, prefixes=8, sharing=0.5, hot=0.1)
AT_ONCE = 24  # requests of each pool, to see how much it can do
LOAD = 0.6  # of that, to see latencies
SECONDS = 8.0
ALONE_S = 30.0  # one pool alone, that all are compared with
THROUGH = 8.0
SHARE = 0.9  # a cluster that brings less of what its pools could is saturated
SLICE = 16


@dataclass(frozen=True, slots=True)
class Point:
    """A layout at one size.

    Attributes:
        layout: its name.
        pools: how many.
        full: as many requests as the pools can take.
        loaded: requests that come at 0.6 of one pool's own rate, each pool; None where the front cannot carry them.
        share: tokens a second over the number of pools times one pool's.
        bound: what the front can carry, requests a second.
        controller: cores that each cluster's controller would need.
        sent_mb_s: that it sends.
        per_million: price of a million tokens, all pools busy.
        saturated: what is full first; "": nothing but the pools.
    """

    layout: str
    pools: int
    full: Figures
    loaded: Figures | None
    share: float
    bound: float
    controller: float
    sent_mb_s: float
    per_million: float
    saturated: str


@dataclass(frozen=True, slots=True)
class Check:
    """One run of a real pool, and what the simulator says."""

    observed: Observed
    simulated: float

    @property
    def error(self) -> float:
        """Relative."""
        return self.simulated / self.observed.tokens_per_s - 1.0


def check(costs: Costs, seconds: float = SECONDS) -> list[Check]:
    """The observed runs, simulated: one pool in one process, nothing before it."""
    nothing = Work(request_s=0.0, chunk_s=0.0)
    free = {"proxy": nothing, "ingress": nothing, "replica": nothing}
    quiet = {
        "choice": Choice(base_s=0.0, per_replica_s=0.0, hear_s=0.0),
        "control": Control(idle=0.0, per_replica=0.0, stats_bytes=0.0, stats_period_s=1.0, byte_s=0.0),
    }
    found = []
    for each in costs.observed:
        way = costs.way.model_copy(update={"draft": each.draft})
        alone = costs.model_copy(update={**free, **quiet, "way": way})
        traffic = Traffic(prompt=each.prompt, answer=each.answer, spread=0.0)
        figures = Cluster(alone, Layout("alone"), 1, traffic).closed(each.concurrency, seconds)
        found.append(Check(each, figures.tokens_per_s))
    return found


def sweep(
    costs: Costs,
    layouts: tuple[Layout, ...] = LAYOUTS,
    sizes: tuple[int, ...] = POOLS,
    seconds: float = SECONDS,
    note: Callable[[str], None] = lambda text: None,
) -> list[Point]:
    """All layouts at all sizes; models are actors with a device each."""
    alone = Cluster(costs, layouts[0], 1, TRAFFIC, split=True).closed(AT_ONCE, ALONE_S)
    items = _items(costs, alone)
    points = []
    for layout in layouts:
        for pools in sizes:
            note(f"{layout.name}, {pools} pools")
            points.append(_point(costs, layout, pools, alone, items, seconds))
    return points


def _point(costs: Costs, layout: Layout, pools: int, alone: Figures, items: float, seconds: float) -> Point:
    bounds = front_bound(costs, layout, pools, items)
    bound = min(bounds.values())
    rate = LOAD * alone.requests_per_s

    # Where the front is full, all requests at once wait there: the run lasts until each has been through so often.
    through = AT_ONCE * pools / min(bound, pools * alone.requests_per_s) if bound else 0.0
    full = Cluster(costs, layout, pools, TRAFFIC, split=True, most=SLICE).closed(
        AT_ONCE, max(seconds, THROUGH * through)
    )
    loaded = None
    if bound > 1.1 * rate * pools:
        loaded = Cluster(costs, layout, pools, TRAFFIC, split=True, most=SLICE).open(rate, seconds)
    busy_controller = full.controller > 1.0
    full_part = min(bounds, key=lambda name: bounds[name]) if bound < pools * alone.requests_per_s else ""
    names = [name for name in (full_part, "controller" if busy_controller else "") if name]
    return Point(
        layout=layout.name,
        pools=pools,
        full=full,
        loaded=loaded,
        share=full.tokens_per_s / (pools * alone.tokens_per_s),
        bound=bound,
        controller=full.controller,
        sent_mb_s=control_bytes_per_s(costs, layout, pools) / 1e6,
        per_million=_price(costs, layout, pools) / 3600 / full.tokens_per_s * 1e6
        if full.tokens_per_s
        else float("inf"),
        saturated=", ".join(names),
    )


def _items(costs: Costs, alone: Figures) -> float:
    """Pieces in which one request's answer is passed on: from the work of the ingress for one pool alone."""
    per_request = alone.busy["ingress"] / alone.requests_per_s
    known = costs.ingress.request_s + costs.choice.base_s + costs.choice.per_replica_s
    known += costs.choice.hear_s / costs.control.stats_period_s / alone.requests_per_s
    return max((per_request - known) / costs.ingress.chunk_s, 1.0) if costs.ingress.chunk_s else 1.0


def _price(costs: Costs, layout: Layout, pools: int) -> float:
    """Of an hour of everything: pools, machines for ingress processes and as many proxies, a head for each cluster."""
    cells = ceil(pools / layout.in_cell(pools))
    fronts = ceil(2 * layout.ingresses(pools) / costs.front_cores) * cells
    prices = costs.prices
    return pools * prices.pool + fronts * prices.front + cells * prices.head


def saturates_at(points: list[Point], layout: str) -> Point | None:
    """The first size at which a cluster brings clearly less than its pools could."""
    return next((each for each in points if each.layout == layout and each.share < SHARE), None)
