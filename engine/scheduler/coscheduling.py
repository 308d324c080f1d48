"""Which of several models on a device goes next: a step with few requests in it waits for more to join.

A forward costs something whoever is in it: weights are read once for all rows. Where answers go to and fro between a
small and a large model, taking turns leaves each of them a part of the requests, and a step of the large one takes
nearly as long as one with all of them. So a step waits while steps of another model bring it company, as far as that
pays: by how many requests came over lately, they are expected to spare the device more time than those who wait lose.
Requests that one model alone works on gain nothing, so the fewer of a step's requests move, the shorter it waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from engine.costs.forward import Forward, StepTime
from engine.scheduler.policy import Limits, Waiting

Operation = TypeVar("Operation", bound=Waiting)

REMEMBERED_ROWS = 512.0  # of the other models' steps, for how many requests come over
FIRST_ROWS = 8.0  # before anything is known, one of so many rows is expected to be a request's last there


class Arrivals:
    """How many requests come over to a model for each row of the steps of others; recent ones weigh most."""

    def __init__(self) -> None:
        self._came, self._rows = 1.0, FIRST_ROWS

    def came(self) -> None:
        """A request that another model worked on last asks for something here."""
        self._came += 1.0

    def passed(self, rows: int) -> None:
        """Another model ran a step with so many operations."""
        kept = max(1.0 - rows / REMEMBERED_ROWS, 0.0)
        self._came, self._rows = self._came * kept, self._rows * kept + rows

    @property
    def a_row(self) -> float:
        """Requests that come over for each row, at most 1."""
        return min(self._came / self._rows, 1.0)


@dataclass(frozen=True, slots=True)
class Prospect:
    """The next step of a model beside another's, as far as it can be told before it is planned.

    Attributes:
        seconds: predicted.
        running_s: predicted for those alone whose sequences are being decoded; of prompts alone, for these.
        wasted: seconds that would not be spent if its tokens were part of a full step, for each operation.
        rows: operations in it.
        moving: those of them whose requests go to and fro between this model and the other.
        willing: share of the operations that is moving, of the tenant with the least.
        full: whether no more fits in.
    """

    seconds: float
    running_s: float
    wasted: float
    rows: int
    moving: int
    willing: float
    full: bool


def prospect_of(
    waiting: Iterable[Operation], limits: Limits, times: StepTime, moves: Callable[[Operation], bool]
) -> Prospect | None:
    """What a step of these operations would cost; None where there is none.

    Args:
        waiting: those that could be in it.
        limits: what it may hold.
        times: predicts durations.
        moves: whether an operation's request is one that the other model works on as well.
    """
    forward, running = Forward(), Forward()
    rows, moving = Counter[str](), Counter[str]()
    full = False
    for work in waiting:
        if work.background:
            continue
        tokens = min(max(work.remaining, 1), limits.token_budget - forward.fed)
        full = tokens <= 0 or forward.sequences == limits.max_batch
        if full:
            break
        forward.add(work.cached, tokens)
        if work.started:
            running.add(work.cached, tokens)
        rows[work.tenant] += 1
        moving[work.tenant] += moves(work)
    if not rows:
        return None
    number, budget = forward.sequences, limits.token_budget
    # Positions attended to cost the same in any step: what company saves is what a step costs beside them.
    beside = times.seconds(forward.fed, forward.fed, number) - forward.fed * times.seconds(budget, budget, 1) / budget
    return Prospect(
        seconds=forward.seconds(times),
        running_s=running.seconds(times) or forward.seconds(times),
        wasted=max(beside, 0.0) / number,
        rows=number,
        moving=moving.total(),
        willing=min(moving[tenant] / count for tenant, count in rows.items()),
        full=full or number == limits.max_batch or forward.fed >= budget,
    )


def waits_for_company(mine: Prospect, coming: Prospect, arrivals: float, held_s: float, limits: Limits) -> bool:
    """Whether the other model's step should come first.

    Args:
        mine: the step that would wait; by no longer than `max_slowdown` lets a prompt stretch it, and than that in the
            proportion of those who move.
        coming: the step that would be run before it, for the sake of requests that may come over.
        arrivals: requests that come over for each row of it.
        held_s: how long mine has waited like this already, seconds.
        limits: of the model that would wait.
    """
    if mine.full or not coming.moving or coming.wasted >= mine.wasted:
        return False
    spared_s = min(arrivals * coming.rows, coming.moving) * mine.wasted
    # The device's time that is spared is spared for all who use both models; the wait is that of those who are here.
    if (mine.rows + coming.moving) * spared_s <= mine.rows * coming.seconds:
        return False
    return held_s + coming.seconds <= (limits.max_slowdown - 1.0) * mine.running_s * mine.willing
