"""How far work in no hurry gives way: a step of it is short, and beside other work it gets a floor, or nothing."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Protocol

# A balance is bounded: a long step must not keep others away for long, nor be paid for for ever.
LARGEST_BALANCE_S = 1.0


class Floor:
    """The share of a device's time that work in no hurry gets while other work waits as well.

    Args:
        share: of the time, at least 0 and less than 1; with 0 it gets none.
    """

    def __init__(self, share: float = 0.0) -> None:
        self.share = share
        self._owed_s = 0.0

    @property
    def due(self) -> bool:
        """Whether it is behind its share."""
        return self._owed_s > 0.0

    def took(self, patient: bool, seconds: float) -> None:
        """Account for a step that was taken while work in no hurry waited."""
        part = -seconds if patient else self.share / (1.0 - self.share) * seconds
        self._owed_s = min(max(self._owed_s + part, -LARGEST_BALANCE_S), LARGEST_BALANCE_S)

    def forgo(self) -> None:
        """Forget what it is behind: none of it could have run."""
        self._owed_s = min(self._owed_s, 0.0)


class _Work(Protocol):
    @property
    def patient(self) -> bool: ...


class _StepTime(Protocol):
    def seconds(self, fed: int, attended: int, sequences: int) -> float: ...


def longest_step(candidates: Iterable[_Work], slowdown: float, times: _StepTime | None) -> float:
    """Seconds a step may take: who comes in a hurry waits for the end of the step that is under way.

    Args:
        candidates: what may be in it.
        slowdown: how many times longer it may be than a step of one token.
        times: how long steps take; None: nobody knows.

    Returns:
        Infinity where nothing in it is in no hurry.
    """
    if times is None or not any(work.patient for work in candidates):
        return inf
    return slowdown * times.seconds(1, 1, 1)
