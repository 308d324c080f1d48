"""The simulator's clock, and a server that takes one thing after the other."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any


class Clock:
    """Event queue in order of time; events of the same moment run in the order they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()

    def after(self, seconds: float, do: Callable[..., None], *args: Any) -> None:
        """Do something later."""
        heappush(self._due, (self.now + seconds, next(self._numbers), do, args))

    def run(self, until: float) -> None:
        """Go on to a moment, or until nothing is due."""
        while self._due and self._due[0][0] <= until:
            self.now, _, do, args = heappop(self._due)
            do(*args)
        self.now = until


class Station:
    """One core, or one link: first come, first served.

    Args:
        clock: of the simulation.
        scale: how much longer all work takes; see `cluster.Cluster`.

    Attributes:
        busy_s: time it has worked, or is to work.
    """

    def __init__(self, clock: Clock, scale: float = 1.0) -> None:
        self.busy_s = 0.0
        self._clock = clock
        self.scale = scale
        self._free_at = 0.0

    def serve(self, seconds: float, then: Callable[..., None], *args: Any) -> None:
        """Do so much work, when what came before is done, and then something."""
        work = seconds * self.scale
        self._free_at = max(self._free_at, self._clock.now) + work
        self.busy_s += work
        self._clock.after(self._free_at - self._clock.now, then, *args)

    @property
    def backlog_s(self) -> float:
        """Work before it now."""
        return max(self._free_at - self._clock.now, 0.0)
