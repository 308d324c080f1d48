"""Placement feasibility: refuses pools that the nodes there are, and those that may be added, can never host.

Bundles are placed by a search in the order of first fit decreasing; it backtracks, so that a refusal is proven.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from actors import placement
from turnout.config import PoolConfig, TurnoutConfig
from turnout.errors import Code, TurnoutError

HEAD_MARK = "node:__internal_head__"
UNBOUNDED = 10**9  # nodes, where an autoscaler has no limit
ROUNDING = 1e-6
MOST_STEPS = 20_000  # of a search; most cases need one for each bundle

Resources = Mapping[str, float]
# What is left of each resource, and the replicas that have a bundle there and want no other there.
Node = tuple[tuple[float, ...], frozenset[int]]


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

    @property
    def count(self) -> int:
        """Nodes that may be added."""
        return min(_number(self.most), sum(_number(each.most) for each in self.addable))

    def total(self, name: str) -> float:
        """The most of a resource that all nodes together may have."""
        left, total = _number(self.most), 0.0
        for amount, most in sorted(((each.resources.get(name, 0.0), each.most) for each in self.types), reverse=True):
            added = min(_number(most), left)
            total += added * amount
            left -= added
        return total

    def beyond(self, nodes: Sequence[Resources]) -> Growth:
        """What may still be added to nodes of which some were added before; the head is none of them."""
        added = [node for node in nodes if HEAD_MARK not in node]
        left = [_number(each.most) for each in self.types]
        for node in added:
            for place, each in enumerate(self.types):
                if left[place] and all(node.get(name) == amount for name, amount in each.resources.items()):
                    left[place] -= 1
                    break
        types = tuple(NodeType(each.name, each.resources, most) for each, most in zip(self.types, left, strict=True))
        return Growth(types, max(_number(self.most) - len(added), 0))


def _number(most: int) -> int:
    return most if most >= 0 else UNBOUNDED


@dataclass(frozen=True, slots=True)
class Replica:
    """What one replica of a pool asks for.

    Attributes:
        pool: its name.
        bundles: each lies on one node.
        strategy: how they lie, as Ray names it.
    """

    pool: str
    bundles: tuple[Resources, ...]
    strategy: str = "PACK"

    @property
    def pieces(self) -> tuple[Resources, ...]:
        """What must lie on one node, for each node."""
        return (sum_of(self.bundles),) if self.strategy == "STRICT_PACK" else self.bundles


@dataclass(frozen=True, slots=True)
class Unplaced:
    """A bundle that found no room where most others had theirs.

    Attributes:
        pool: whose it is.
        bundle: what it asks for.
        left: the most of each of its resources that a node had left.
        proven: whether no other order gives it room; otherwise the search was given up.
    """

    pool: str
    bundle: Resources
    left: Resources
    proven: bool

    @property
    def short(self) -> str:
        """For people: the resources that are short."""
        return placement.short_of(self.bundle, [self.left])


def sum_of(bundles: Sequence[Resources], times: float = 1) -> dict[str, float]:
    """Add up what bundles ask for, `times` times."""
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + times * amount
    return total


def fit(replicas: Sequence[Replica], nodes: Sequence[Resources], more: Growth | None = None) -> Unplaced | None:
    """Look for a place for every bundle of all replicas.

    Args:
        replicas: all that are wanted at the same time.
        nodes: what each node has.
        more: what may still be added; None: nothing.

    Returns:
        None where all find one; else the bundle at which the best attempt ended.
    """
    return _Search(replicas, more).run(nodes)


def refusal(unplaced: Unplaced, nodes: Sequence[Resources], more: bool) -> TurnoutError:
    """Why pools cannot be hosted, where each of their bundles could be, alone.

    Args:
        unplaced: proven.
        nodes: what each live node offers.
        more: whether an autoscaler may add nodes.
    """
    added = ", and what the autoscaler may add," if more else ""
    message = (
        f"pool {unplaced.pool!r}: the nodes{added} have no room for all bundles at the same time: none is left for"
        f" {placement.shown(unplaced.bundle)} ({unplaced.short}); {placement.offers(nodes)}: add nodes, lower"
        f" pools.*.replicas, or change pools.{unplaced.pool}.placement"
    )
    return TurnoutError(Code.UNAVAILABLE, message, f"pools.{unplaced.pool}.placement")


class _Search:
    """Depth first, the largest bundles first, each into the fullest node that can take it; no state is tried twice."""

    def __init__(self, replicas: Sequence[Replica], more: Growth | None) -> None:
        wanted = sum_of([sum_of(replica.bundles) for replica in replicas])
        self._names = sorted(wanted)
        self._pieces = sorted(
            ((number, piece) for number, replica in enumerate(replicas) for piece in replica.pieces),
            key=lambda each: -sum(amount / wanted[name] for name, amount in each[1].items() if amount),
        )
        self._replicas = replicas
        self._types = () if more is None else more.addable
        self._counts = tuple(_number(each.most) for each in self._types)
        self._most = 0 if more is None else _number(more.most)
        self._seen: set[tuple[int, tuple[Node, ...]]] = set()
        self._best = -1
        self._left: tuple[Node, ...] = ()
        self._steps = 0

    def run(self, nodes: Sequence[Resources]) -> Unplaced | None:
        """See `fit`."""
        # A stack of its own: there may be more bundles than Python may call functions.
        stack = [iter([(tuple(sorted(map(self._node, nodes))), self._counts)])]
        while stack:
            state = next(stack[-1], None)
            if state is None:
                stack.pop()
                continue
            place = len(stack) - 1
            if place == len(self._pieces):
                return None
            self._steps += 1
            if self._steps > MOST_STEPS:
                return self._unplaced(proven=False)
            if place > self._best:
                self._best, self._left = place, state[0]
            if (place, state[0]) not in self._seen:
                self._seen.add((place, state[0]))
                stack.append(self._next(place, *state))
        return self._unplaced(proven=True)

    def _next(
        self, place: int, nodes: tuple[Node, ...], counts: tuple[int, ...]
    ) -> Iterator[tuple[tuple[Node, ...], tuple[int, ...]]]:
        """The states after a piece has found a place, wherever it can."""
        number, piece = self._pieces[place]
        alone = self._replicas[number].strategy == "STRICT_SPREAD"
        amounts = tuple(piece.get(name, 0.0) for name in self._names)
        before: Node | None = None
        for index, node in enumerate(nodes):
            if node != before and (taken := _take(node, amounts, number if alone else None)) is not None:
                yield tuple(sorted((*nodes[:index], taken, *nodes[index + 1 :]))), counts
            before = node
        if sum(self._counts) - sum(counts) >= self._most:
            return
        for index, each in enumerate(self._types):
            if (
                counts[index]
                and (taken := _take(self._node(each.resources), amounts, number if alone else None)) is not None
            ):
                left = (*counts[:index], counts[index] - 1, *counts[index + 1 :])
                yield tuple(sorted((*nodes, taken))), left

    def _node(self, resources: Resources) -> Node:
        return tuple(resources.get(name, 0.0) for name in self._names), frozenset()

    def _unplaced(self, proven: bool) -> Unplaced:
        number, piece = self._pieces[self._best]
        left = {
            name: max((amounts[index] for amounts, _ in self._left), default=0.0)
            for index, name in enumerate(self._names)
            if name in piece
        }
        return Unplaced(self._replicas[number].pool, piece, left, proven)


def _take(node: Node, amounts: tuple[float, ...], alone: int | None) -> Node | None:
    """The node with so much less, or None where it has not as much, or hosts what wants to be alone there."""
    left, hosted = node
    if alone in hosted or any(amount > there + ROUNDING for amount, there in zip(amounts, left, strict=True)):
        return None
    rest = tuple(round(there - amount, 6) for amount, there in zip(amounts, left, strict=True))
    return rest, hosted if alone is None else hosted | {alone}


def check_room(
    config: TurnoutConfig,
    bundles: Mapping[str, Sequence[Resources]],
    nodes: Sequence[Resources],
    more: Growth | None,
) -> list[str]:
    """Refuse pools that the cluster can never host, busy or not.

    Args:
        config: whose pools are to be served.
        bundles: what one replica asks for, of each pool that runs in replicas.
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
    for name, pool in config.replica_pools.items():
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
    unplaced = fit(wanted, nodes, left)
    if unplaced is None:
        return []
    if unplaced.proven:
        raise refusal(unplaced, nodes, left is not None)
    return [_unknown(unplaced)]


def _unknown(unplaced: Unplaced) -> str:
    return f"pool {unplaced.pool!r}: whether there is room for all bundles at the same time was not found out"


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
