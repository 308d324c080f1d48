"""How long a forward pass takes: a cost model fitted to measurements, corrected while serving."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.costs.least_squares import Floats, robust_nonnegative

# Fed tokens where the slope may change: at few rows a forward is bound by reading the weights, later by arithmetic.
KNOTS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# Candidates for `StepCost.read_cap`, positions.
READ_CAPS = (128, 256, 512, 1024)
# Forwards whose median ratio corrects the prediction: a change of pace is followed after half as many.
RECENT = 15


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured forward; the arguments of `StepTime.seconds`, and what it took."""

    fed: int
    attended: int
    sequences: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepCost:
    """The fitted coefficients, in seconds.

    Attributes:
        base: what every forward costs.
        knots: fed tokens from which each slope holds, ascending.
        slopes: per fed token after each knot.
        per_attended: per position a fed token attends to.
        per_read: further cost per such position while the sequence has fewer than `read_cap` of them: a sequence
            that feeds one token reads its whole context for it, the tokens of a chunk share what is read.
        read_cap: positions per sequence.
        per_sequence: per sequence in the forward.
    """

    base: float
    knots: tuple[int, ...]
    slopes: tuple[float, ...]
    per_attended: float
    per_read: float
    read_cap: int
    per_sequence: float


class _Correction:
    """The median of the last `RECENT` ratios; 1.0 before the first."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque()
        self._sorted: list[float] = []
        self.factor = 1.0

    @property
    def seen(self) -> bool:
        return bool(self._ratios)

    def observe(self, ratio: float) -> None:
        if len(self._ratios) == RECENT:
            oldest = self._ratios.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._ratios.append(ratio)
        insort(self._sorted, ratio)
        self.factor = self._sorted[len(self._sorted) // 2]


class StepTime:
    """Predicts the wall time of one forward.

    `T = f(fed) + a * attended + b * min(attended, cap * sequences) + c * sequences`, f piecewise linear and no
    coefficient negative: never falling when tokens, positions, or sequences with a token each, are added. That is
    SmartSpec's linear form (paper #197: Optimizing Speculative Decoding for Serving Large Language Models Using
    Goodput) with a bend where a forward stops being bound by memory. The prediction is multiplied by the median of the
    last `RECENT` ratios of measured to fitted time, so that a machine that became slower or faster is followed and a
    single slow forward is not. Forwards of single tokens, and those with chunks or drafts, have such a correction each:
    the scheduler weighs the second kind against the first, and an error of the fit that both shared would stay.

    Args:
        cost: fitted coefficients.
    """

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self._at_knot = [cost.base]
        for index in range(len(cost.knots) - 1):
            width = cost.knots[index + 1] - cost.knots[index]
            self._at_knot.append(self._at_knot[-1] + cost.slopes[index] * width)
        self._single = _Correction()
        self._longer = _Correction()

    @classmethod
    def fit(cls, samples: Sequence[Sample]) -> StepTime:
        """Fit the coefficients to measured forwards, by relative error.

        Raises:
            ValueError: no samples.
        """
        if not samples:
            raise ValueError("a step time needs at least one measured forward")
        measured = sorted({sample.fed for sample in samples})
        # A slope between two knots needs a measurement at its end, and the last one a measurement beyond it.
        knots = (1, *(knot for knot in KNOTS[1:] if knot in measured[:-1]))
        seconds = np.array([sample.seconds for sample in samples])
        fits = []
        for cap in READ_CAPS:
            features = np.array([_features(sample, knots, cap) for sample in samples])
            found, loss = robust_nonnegative(features, seconds)
            fits.append((loss, cap, found))
        _, cap, found = min(fits, key=lambda fit: fit[0])
        return cls(_cost(found, knots, cap))

    def seconds(self, fed: int, attended: int, sequences: int) -> float:
        """Predicted wall time of one forward, in seconds.

        Args:
            fed: tokens in the forward.
            attended: sum over them of the positions each attends to, its own included.
            sequences: sequences in the forward.
        """
        single = self._single.factor * self._fitted(min(fed, sequences), attended, sequences)
        if fed <= sequences:
            return single
        return max(single, self._longer.factor * self._fitted(fed, attended, sequences))

    def observe(self, fed: int, attended: int, sequences: int, seconds: float) -> None:
        """Take note of what a forward really took; the arguments as for `seconds`."""
        fitted = self._fitted(fed, attended, sequences)
        if fitted <= 0.0:
            return
        if fed > sequences:
            self._longer.observe(seconds / fitted)
            return
        self._single.observe(seconds / fitted)
        if not self._longer.seen:
            self._longer.factor = self._single.factor  # nothing better is known of how fast the machine is now

    def _fitted(self, fed: int, attended: int, sequences: int) -> float:
        cost = self.cost
        index = max(bisect_right(cost.knots, fed) - 1, 0)
        return (
            self._at_knot[index]
            + cost.slopes[index] * max(fed - cost.knots[index], 0)
            + cost.per_attended * attended
            + cost.per_read * min(attended, cost.read_cap * sequences)
            + cost.per_sequence * sequences
        )


def relative_errors(step_time: StepTime, samples: Iterable[Sample]) -> Floats:
    """|predicted - measured| / measured of each sample: [N]."""
    return np.array([abs(step_time.seconds(s.fed, s.attended, s.sequences) / s.seconds - 1.0) for s in samples])


def _features(sample: Sample, knots: tuple[int, ...], cap: int) -> list[float]:
    """What each coefficient is multiplied with: base, slopes, per_attended, per_read, per_sequence."""
    ends = (*knots[1:], sample.fed)
    ramps = [max(min(sample.fed, end) - knot, 0) for knot, end in zip(knots, ends, strict=True)]
    return [1, *ramps, sample.attended, min(sample.attended, cap * sample.sequences), sample.sequences]


def _cost(found: Floats, knots: tuple[int, ...], cap: int) -> StepCost:
    base, *slopes, per_attended, per_read, per_sequence = (float(value) for value in found)
    return StepCost(base, knots, tuple(slopes), per_attended, per_read, cap, per_sequence)
