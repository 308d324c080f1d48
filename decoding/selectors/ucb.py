"""The arm whose gain could still be the largest."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from decoding.selectors._bandit import RECENT, Bandit, BanditParams, second_largest
from decoding.sequence import Sequence

FARTHEST = 4.0  # times the second fastest of these, that a speed may count


class UcbParams(BanditParams):
    """Parameters of `ucb`."""

    radius: Annotated[
        Literal["ucb1", "self_normalised"],
        Field(description="ucb1: sqrt(exploration ln n / n_i); self_normalised: the bound with `delta`"),
    ] = "ucb1"
    exploration: Annotated[FiniteFloat, Field(ge=0, le=100, description="c of the ucb1 radius")] = 0.5
    delta: Annotated[
        FiniteFloat, Field(gt=0, lt=1, description="chance that the self-normalised bound fails somewhere")
    ] = 0.05


@dataclass(slots=True)
class UcbState:
    """State of every arm.

    Attributes:
        pulls: [arms] how often each was pulled and its gain seen.
        gains: [arms] sum of its gains.
        width: see `Learned`.
        recent: [arms] tokens per second of its last `RECENT` pulls.
    """

    pulls: list[int]
    gains: list[float]
    width: float = 0.0
    recent: list[list[float]] = field(default_factory=list)


class Ucb(Bandit[UcbState]):
    """UCBSpec (paper #44, BanditSpec), for arms whose gains do not drift.

    Every arm once, then the largest mean_i + r_i. With gains from 0 to L after n rounds, K arms and n_i pulls of arm
    i, r_i is L sqrt(c ln n / n_i), or the self-normalised
    (L / 2) sqrt((1 + n_i) / n_i^2 (1 + 2 ln(K n^2 sqrt(1 + n_i) / delta))). For speeds, which have no known bound, L is
    the largest mean, and a speed counts as `FARTHEST` times the second fastest of the arm's recent ones at most, so
    that no single measurement makes a mean. An arm's first speed is judged when there is a second.
    """

    Params = UcbParams
    params: UcbParams
    papers = (44,)

    def fresh(self, num_arms: int) -> UcbState:
        """Nothing pulled."""
        return UcbState([0] * num_arms, [0.0] * num_arms, recent=[[] for _ in range(num_arms)])

    def rank(self, seq: Sequence) -> list[int]:
        """Arms by their upper bounds; those never seen first, in the order of the request."""
        state = self.state
        means = [gains / pulls for pulls, gains in zip(state.pulls, state.gains, strict=True) if pulls]
        # A round's largest possible speed is not known, and the fastest one seen is an outlier.
        width = state.width if self.params.reward == "tokens" else max(means, default=0.0)
        bounds = [
            gains / pulls + width * self.radius(pulls, sum(state.pulls), len(state.pulls)) if pulls else math.inf
            for pulls, gains in zip(state.pulls, state.gains, strict=True)
        ]
        return sorted(range(len(bounds)), key=bounds.__getitem__, reverse=True)

    def radius(self, pulls: int, rounds: int, num_arms: int) -> float:
        """Return the confidence radius of the mean of an arm's gains, for gains from 0 to 1.

        Args:
            pulls: of this arm.
            rounds: pulls of all arms.
            num_arms: how many there are.
        """
        if self.params.radius == "ucb1":
            return math.sqrt(self.params.exploration * math.log(rounds) / pulls)
        chance = math.log(num_arms * rounds**2 * math.sqrt(1 + pulls) / self.params.delta)
        return 0.5 * math.sqrt((1 + pulls) / pulls**2 * (1 + 2 * chance))

    def learn(self, arm: int, gain: float) -> None:
        """Count a pull."""
        state = self.state
        state.pulls[arm] += 1
        if self.params.reward == "tokens":
            state.gains[arm] += gain
            return
        recent = state.recent[arm]
        before = _bounded_sum(recent)
        recent.append(gain)
        # What leaves the window stays counted as it was.
        state.gains[arm] += _bounded_sum(recent) - before
        del recent[:-RECENT]


def _bounded_sum(speeds: list[float]) -> float:
    """Sum of speeds, each at most `FARTHEST` times the second fastest: only the fastest can be more."""
    if not speeds:
        return 0.0
    return sum(speeds) - max(max(speeds) - FARTHEST * second_largest(speeds), 0.0)


PART = Ucb
