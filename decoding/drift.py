"""Drift detection: compare the values that a threshold sees with those that it was calibrated on."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from decoding.model import ModelPool
from turnout.calls import DriftReading

log = logging.getLogger(__name__)

WINDOW = 128  # answers
STORE = "drift"
# Where the caller of a method leaves a recorder for its values; a calibration's own watch takes precedence.
TALLY = "tally"
# Where a method leaves the reading in `Request.extra`, for the answer's usage to show.
DRIFT = "drift"


class Recorder(Protocol):
    """Recorder of the values that a threshold is compared with."""

    def add(self, value: float) -> None:
        """Take one value."""
        ...


class Tally:
    """Counts values in bins. Plain state: it travels with a rule.

    Args:
        edges: inner edges of the bins, ascending; a value on an edge belongs to the bin below it.
    """

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = tuple(edges)
        self.counts = [0] * (len(self.edges) + 1)

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.edges, value)] += 1


def population_stability(expected: Sequence[float], counts: Sequence[int]) -> float:
    """Population stability index of counts against expected shares: sum of (live - expected) ln(live / expected).

    Half a count is added to every bin of both sides, so that an empty bin stays finite.

    Args:
        expected: share of each bin.
        counts: live values in each bin, at least one.
    """
    total = sum(counts)
    rest = total + 0.5 * len(counts)
    pairs = [
        ((share * total + 0.5) / rest, (count + 0.5) / rest) for share, count in zip(expected, counts, strict=True)
    ]
    return sum((live - should) * math.log(live / should) for should, live in pairs)


@dataclass(frozen=True, slots=True)
class _Answer:
    counts: tuple[int, ...]
    expected: tuple[float, ...]


class DriftWatch:
    """A sliding window over a pool's last answers under one calibration.

    Answers may have been given at different settings of the same calibration: what is expected of the window is the
    mean of what was expected of each, weighted by how much of each was seen.

    Args:
        name: of the calibration.
        version: of it.
        limit: index beyond which there is drift.
        window: answers.
    """

    def __init__(self, name: str, version: str, limit: float, window: int = WINDOW) -> None:
        self.name = name
        self.version = version
        self.limit = limit
        self._answers: deque[_Answer] = deque(maxlen=window)
        self._drifted = False

    def add(self, counts: Sequence[int], expected: Sequence[float]) -> DriftReading | None:
        """Take a finished answer; tells and logs when the window comes to lie beyond the limit, and when it is back.

        Args:
            counts: what the rule looked at in it, by bin.
            expected: share of each bin at the answer's setting.

        Returns:
            The window's reading; None until it is full.
        """
        if sum(counts):
            self._answers.append(_Answer(tuple(counts), tuple(expected)))
        if len(self._answers) < (self._answers.maxlen or 0):
            return None
        index = self.index()
        drifted = index > self.limit
        if drifted and not self._drifted:
            log.warning(
                "what is seen has left what calibration %s (version %s) was made for: stability index %.3f over the"
                " last %d answers, at most %.3f is expected; calibrate again on prompts of this kind",
                self.name, self.version, index, len(self._answers), self.limit,
            )  # fmt: skip
        elif self._drifted and not drifted:
            log.info("what is seen is back in the range of calibration %s (version %s)", self.name, self.version)
        self._drifted = drifted
        return DriftReading(self.name, self.version, index, self.limit, len(self._answers))

    def index(self) -> float:
        """Population stability index of the window."""
        counts = [sum(column) for column in zip(*(answer.counts for answer in self._answers), strict=True)]
        mixed = [0.0] * len(counts)
        for answer in self._answers:
            weight = sum(answer.counts) / sum(counts)
            mixed = [share + weight * more for share, more in zip(mixed, answer.expected, strict=True)]
        return population_stability(mixed, counts)


def watch_of(models: ModelPool, name: str, version: str, limit: float) -> DriftWatch:
    """The pool's watch over a calibration; a new version of the artifact begins anew.

    One for all tenants: it holds counts of values, from which no text can be inferred.
    """
    stores = models.small.stores
    kept: dict[str, DriftWatch] = stores.open(STORE, "", dict)
    if name not in kept or kept[name].version != version:
        kept[name] = DriftWatch(name, version, limit)
    return kept[name]
