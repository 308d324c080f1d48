"""Coscheduling: of several models on a device, one with few requests delays its step so that more requests join it.

A forward has a cost that does not depend on its rows: weights are read once for all. If answers move between a small
and a large model, alternating leaves each of them part of the requests, and a step of the large model takes nearly as
long with them as with all. So a step is delayed while steps of the other model bring requests to it, as long as the
time they are expected to save the device, by the recent rate of transfers, exceeds what the delayed requests lose.
Requests that use one model only gain nothing, so the delay shrinks with their fraction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from engine.costs.forward import Forward, StepTime
from engine.scheduler.limits import Limits, Waiting

Operation = TypeVar("Operation", bound=Waiting)

REMEMBERED_ROWS = 512.0  # of the other models' steps: window of the transfer rate
FIRST_ROWS = 8.0  # assumed at first: one transfer for this number of rows


class TransferRate:
    """Rate at which requests move to a model, for each row of other models' steps; recent rows weigh most."""

    def __init__(self) -> None:
        self._arrived, self._rows = 1.0, FIRST_ROWS

    def arrived(self) -> None:
        """Count an operation on a sequence that another model worked on last."""
        self._arrived += 1.0

    def ran(self, rows: int) -> None:
        """Count a step of another model with `rows` operations."""
        kept = max(1.0 - rows / REMEMBERED_ROWS, 0.0)
        self._arrived, self._rows = self._arrived * kept, self._rows * kept + rows

    @property
    def per_row(self) -> float:
        """Requests that arrive for each row, at most 1."""
        return min(self._arrived / self._rows, 1.0)


@dataclass(frozen=True, slots=True)
class StepForecast:
    """Forecast of a model's next step, before it is planned, with regard to another model of the device.

    Attributes:
        seconds: predicted.
        running_s: predicted for the decodes alone; without decodes, for the prompts.
        wasted: seconds for each operation that would not be spent if its tokens were part of a full step.
        rows: operations in it.
        moving: operations whose requests use both models.
        willing: moving operations as a fraction of all, for the tenant with the least.
        full: no more operations fit.
    """

    seconds: float
    running_s: float
    wasted: float
    rows: int
    moving: int
    willing: float
    full: bool


def forecast_step(
    waiting: Iterable[Operation], limits: Limits, times: StepTime, moves: Callable[[Operation], bool]
) -> StepForecast | None:
    """Forecast a step of these operations; None if there are none.

    Args:
        waiting: operations that could be in it.
        limits: limits of the step.
        times: predicts durations.
        moves: returns whether an operation's request uses the other model as well.
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
    # Attention costs the same in any step: a fuller step saves part of the rest.
    fixed = times.seconds(forward.fed, forward.fed, number) - forward.fed * times.seconds(budget, budget, 1) / budget
    return StepForecast(
        seconds=forward.seconds(times),
        running_s=running.seconds(times) or forward.seconds(times),
        wasted=max(fixed, 0.0) / number,
        rows=number,
        moving=moving.total(),
        willing=min(moving[tenant] / count for tenant, count in rows.items()),
        full=full or number == limits.max_batch or forward.fed >= budget,
    )


def should_wait(mine: StepForecast, coming: StepForecast, rate: float, delayed_s: float, limits: Limits) -> bool:
    """Return whether the other model's step should run first.

    Args:
        mine: the step to delay, by at most what `max_slowdown` allows a prompt to stretch it, times `willing`.
        coming: the step that would run before it.
        rate: requests that move here for each row of `coming`.
        delayed_s: delay of `mine` so far, in seconds.
        limits: of the model to delay.
    """
    if mine.full or not coming.moving or coming.wasted >= mine.wasted:
        return False
    saved_s = min(rate * coming.rows, coming.moving) * mine.wasted
    # Time that the device saves is saved for all requests that use both models; only those waiting here are delayed.
    if (mine.rows + coming.moving) * saved_s <= mine.rows * coming.seconds:
        return False
    return delayed_s + coming.seconds <= (limits.max_slowdown - 1.0) * mine.running_s * mine.willing
