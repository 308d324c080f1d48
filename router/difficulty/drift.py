"""Whether what a router predicts for live requests still looks like what it predicted for held-out prompts."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence

from decoding.drift import population_stability
from router.difficulty.curve import quantile
from turnout.calls import DriftReading

log = logging.getLogger(__name__)

WINDOW = 256  # requests
BINS = 10
# With as many requests and bins, and some hundred held-out prompts, chance alone stays below a third of this.
LIMIT = 0.3


class GainDrift:
    """A sliding window over predicted gains, in the bins that each held a tenth of the held-out prompts.

    Args:
        gains: evenly spaced quantiles of the held-out prompts' predicted gains.
        name: of the artifact.
        version: of it.
        window: requests.
    """

    def __init__(self, gains: Sequence[float], name: str, version: str, window: int = WINDOW) -> None:
        self._edges = [quantile(gains, place / BINS) for place in range(1, BINS)]
        # Counted, not a tenth each: predictions may be tied, and a tie falls into one bin.
        self._expected = [count / len(gains) for count in self._count(self._place(gain) for gain in gains)]
        self._name = name
        self._version = version
        self._seen: deque[int] = deque(maxlen=window)
        self._drifted = False

    def add(self, gain: float) -> DriftReading | None:
        """Take the next request's predicted gain; logs when the window leaves the calibrated range and comes back.

        Returns:
            The window's reading; None until it is full.
        """
        self._seen.append(self._place(gain))
        if len(self._seen) < (self._seen.maxlen or 0):
            return None
        index = population_stability(self._expected, self._count(self._seen))
        if (index > LIMIT) != self._drifted:
            self._drifted = index > LIMIT
            log.warning(
                "predicted gains have %s what router %s (version %s) was trained on: stability index %.3f over the last"
                " %d requests, at most %.1f is expected",
                "left" if self._drifted else "come back to", self._name, self._version, index, len(self._seen), LIMIT,
            )  # fmt: skip
        return DriftReading(self._name, self._version, index, LIMIT, len(self._seen))

    def _place(self, gain: float) -> int:
        return bisect_left(self._edges, gain)

    def _count(self, places: Iterable[int]) -> list[int]:
        counts = [0] * BINS
        for place in places:
            counts[place] += 1
        return counts
