"""Time that routing adds to a request that the small model answers: the same questions routed, and direct."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from benchmarks.harness import Side, take_turns
from benchmarks.strategies import at_once
from experiments.grid.answering import answer, forget
from experiments.grid.cells import Record
from experiments.stats.intervals import Floats, Interval, ratio
from pool.local_pool import LocalPool
from pool.routing import PoolRouting
from router.difficulty.curve import NEVER
from turnout.calls import AUTO, GenerateCall
from turnout.config import PolicyChoice, RoutingConfig


@dataclass(frozen=True, slots=True)
class RoutedCost:
    """Requests that were routed to the small model, compared with the same ones that named it.

    Attributes:
        concurrent: at work at once.
        requests: different ones.
        rounds: how often each was answered in either way, one way after the other and every other round first.
        more: time that the routed ones took beyond the others', as a share of the others'.
        alike: share of the requests whose two answers are the same text; others differ in length, and so in time.
    """

    concurrent: int
    requests: int
    rounds: int
    more: Interval
    alike: float


async def routed_cost(
    pool: LocalPool, artifact: str, calls: list[GenerateCall], concurrent: int, rounds: int
) -> RoutedCost:
    """Answer calls in both ways, with nothing cached before each time.

    Args:
        pool: idle; its routing is replaced.
        artifact: of the router, asked with a threshold that no gain reaches.
        calls: the requests; the method is set here.
        concurrent: at work at once.
        rounds: how often.
    """
    config = RoutingConfig(policy=PolicyChoice(name="learned", params={"artifact": artifact, "threshold": NEVER}))
    pool.routing = PoolRouting(config, pool.name, pool.model_pool)
    ways = {
        "routed": [replace(call, method=AUTO) for call in calls],
        "alone": [replace(call, method="plain", params={"model": "small"}) for call in calls],
    }

    def side(name: str, asked: list[GenerateCall]) -> Side[list[Record]]:
        async def turn(_: int) -> list[Record]:
            forget(pool)
            return await at_once((answer(pool, call, call.request_id) for call in asked), concurrent)

        return Side(name, turn)

    try:
        turns = await take_turns([side(name, asked) for name, asked in ways.items()], rounds, warm_up=False)
    finally:
        await pool.routing.close()
        pool.routing = None
    routed, alone = (_walls(turns.readings[name]) for name in ways)
    last = zip(turns.readings["routed"][-1], turns.readings["alone"][-1], strict=True)
    alike = np.mean([one.text == other.text for one, other in last])
    return RoutedCost(concurrent, len(calls), rounds, ratio(routed - alone, alone), float(alike))


def _walls(readings: list[list[Record]]) -> Floats:
    """[requests] seconds, all rounds together."""
    walls: Floats = np.sum([[record.wall_s for record in records] for records in readings], axis=0)
    return walls
