"""Which of several models on a device goes next: a step with few requests in it waits for more to join.

A forward costs something whoever is in it: weights are read once for all rows. Where answers go to and fro between a
small and a large model, taking turns leaves each of them a part of the requests, and a step of the large one takes
nearly as long as one with all of them. So a step waits while steps of another model bring it company, as long as that
costs its requests less than a prompt read beside them may. Only requests that both models work on are company.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from engine.costs.forward import Forward, StepTime
from engine.scheduler import Limits, Waiting

Operation = TypeVar("Operation", bound=Waiting)


@dataclass(frozen=True, slots=True)
class Prospect:
    """The next step of a model, as far as it can be told before it is planned.

    Attributes:
        seconds: predicted.
        wasted: seconds that would not be spent if its tokens were part of a full step, for each request that counts.
        tenants: whose requests these are.
    """

    seconds: float
    wasted: float
    tenants: frozenset[str]


def prospect_of(
    waiting: Iterable[Operation],
    limits: Limits,
    times: StepTime,
    counts: Callable[[Operation], bool] = lambda work: True,
) -> Prospect | None:
    """What a step of these operations would cost; None where there is none that counts.

    Args:
        waiting: those that could be in it.
        limits: what it may hold.
        times: predicts durations.
        counts: whether an operation is one for whose sake the step would be run.
    """
    forward, tenants, number = Forward(), set[str](), 0
    for work in waiting:
        tokens = min(max(work.remaining, 1), limits.token_budget - forward.fed)
        if work.background or tokens <= 0:
            continue
        forward.add(work.cached, tokens)
        if counts(work):
            tenants.add(work.tenant)
            number += 1
        if forward.sequences == limits.max_batch:
            break
    if not number:
        return None
    full = limits.token_budget
    at_best = forward.fed * times.seconds(full, full, 1) / full
    seconds = forward.seconds(times)
    return Prospect(seconds, max(seconds - at_best, 0.0) / number, frozenset(tenants))


def waits_for_company(mine: Prospect, others: Prospect, held_s: float, limits: Limits) -> bool:
    """Whether the other model's step should come first.

    Args:
        mine: the step that would wait; by no longer than `max_slowdown` lets a prompt stretch it.
        others: the step that would be run before it, for the sake of requests that may come over.
        held_s: how long mine has waited like this already, seconds.
        limits: of the model that would wait.
    """
    if others.wasted >= mine.wasted or not mine.tenants <= others.tenants:
        return False  # who has nothing to gain from the other step is not held up by it
    return held_s + others.seconds <= (limits.max_slowdown - 1.0) * mine.seconds
