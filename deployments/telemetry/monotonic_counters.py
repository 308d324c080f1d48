"""Counts of processes that come and go, as totals that only grow."""

from __future__ import annotations

import time
from collections import OrderedDict

# An ingress takes over from another one: for this time both may report the same, so that nothing is lost.
OVERLAP_S = 60.0
MOST_PROCESSES = 1024  # remembered; the longest unseen is forgotten

Counts = dict[tuple[str, ...], float]


class Growing:
    """Adds up what processes have counted since this began.

    A process that does not answer for a while, or has ended, takes nothing away; one that begins anew starts from 0.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[str, ...], Counts] = OrderedDict()
        self.totals: Counts = {}
        self._began = time.monotonic()

    @property
    def age_s(self) -> float:
        """What was counted longer ago than this many seconds, another one has reported."""
        return time.monotonic() - self._began + OVERLAP_S

    def take(self, process: tuple[str, ...], counts: Counts, before: Counts | None = None) -> bool:
        """What a process has counted by now.

        Args:
            process: which.
            counts: by name.
            before: what of it was counted before this began, where it is older: that is not counted again.

        Returns:
            Whether it is seen for the first time.
        """
        known = self._last.pop(process, None)
        last = known if known is not None else before or {}
        for name, value in counts.items():
            earlier = last.get(name, 0.0)
            self.totals[name] = self.totals.get(name, 0.0) + (value - earlier if value >= earlier else value)
        self._last[process] = counts
        if len(self._last) > MOST_PROCESSES:
            self._last.popitem(last=False)
        return known is None
