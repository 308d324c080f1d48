"""Progress rate of a job and its estimated time to the end."""

from __future__ import annotations

import time
from collections.abc import Callable


class ProgressRate:
    """Rate of lines since it was made; lines that are done when it is first asked count as done before.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._before: int | None = None

    def rate(self, done: int) -> float:
        """Return lines per second, given the number done."""
        if self._before is None:
            self._before = done
        return (done - self._before) / max(self._clock() - self._since, 1e-9)


def left_s(done: int, total: int, rate: float) -> float | None:
    """Return seconds to the end at this rate; None: unknown."""
    return (total - done) / rate if rate else None
