"""Quality that switching keeps of the large model's at a share of its tokens, and the goals for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.harness import Goal
from experiments.stats.intervals import Floats, Interval, resampled

ROUNDS = 1000


@dataclass(frozen=True, slots=True)
class Retention:
    """A part of the large model's quality, `least`, that is to be kept where it writes `share` of the tokens."""

    share: float
    least: float

    @property
    def goal(self) -> Goal:
        """Of the part that is kept."""
        return Goal(self.least)


RETENTIONS = (Retention(0.25, 0.929), Retention(0.43, 0.967))  # paper #2


@dataclass(frozen=True, slots=True)
class Spent:
    """One setting on a set of prompts, [prompts] each.

    Attributes:
        scores: of the answers.
        by_large: tokens that the large model wrote, dropped ones included.
        tokens: of the answers.
    """

    scores: Floats
    by_large: Floats
    tokens: Floats

    @property
    def share(self) -> float:
        """Tokens of the large model per token of the answers."""
        return _share(self.by_large, self.tokens)


def _share(by_large: Floats, tokens: Floats) -> float:
    return float(by_large.sum() / tokens.sum()) if tokens.sum() else 0.0


def kept_at(settings: Sequence[Spent], large: Floats, share: float) -> Interval:
    """Quality relative to the large model's, where it writes a share of the tokens: between neighbouring settings.

    The line between two settings is what using each for a part of the prompts gives. Nothing is smoothed: where more of
    the large model's tokens lower the quality, that shows.

    Args:
        settings: all on the same prompts; the small model alone may be among them.
        large: [prompts] scores of the large model alone.
        share: tokens of the large model per token of the answers.

    Returns:
        With a 95% interval over prompts drawn again; NaN where no setting comes so high, or so low.
    """
    by_large, tokens, scores = (
        np.array([getattr(each, name) for each in settings]) for name in ("by_large", "tokens", "scores")
    )

    def kept(rows: np.ndarray) -> float:
        shares = by_large[:, rows].sum(axis=1) / np.maximum(tokens[:, rows].sum(axis=1), 1e-9)
        order = np.argsort(shares, kind="stable")
        if not shares[order[0]] <= share <= shares[order[-1]]:
            return float("nan")
        quality = float(np.interp(share, shares[order], scores[:, rows].mean(axis=1)[order]))
        best = float(large[rows].mean())
        return quality / best if best > 0 else float("nan")

    return resampled(kept, len(large), 0, ROUNDS)


def judged(value: Interval, goal: Goal, what: str = "{:.1%}") -> str:
    """Write a figure's goal: met or missed, and whether the interval is sure of it.

    Args:
        value: the figure; NaN: there is none.
        goal: of the figure.
        what: how the goal is written.
    """
    text = f"goal at {'most' if goal.at_most else 'least'} {what.format(goal.value)}"
    if math.isnan(value.value):
        return f"{text}: not measured"
    verdict = f"{text}: {'met' if goal.met(value) == 'yes' else 'missed'}"
    if math.isnan(value.low):
        return f"{verdict}, without an interval"
    return verdict if goal.surely_met(value) != "open" else f"{verdict}, but the interval holds the goal"


def percent(value: Interval) -> str:
    """As percentages."""
    ends = "interval unknown" if math.isnan(value.low) else f"{_percent(value.low)}, {_percent(value.high)}"
    return f"{_percent(value.value)} [{ends}]"


def _percent(value: float) -> str:
    return "not reached" if math.isinf(value) else f"{value:.1%}"
