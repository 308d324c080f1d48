"""Regularisers of an answer's surprisals (uniform information density), kept up token by token; paper #82."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from decoding.search.base import Hypothesis

Regulariser = Literal["variance", "local", "max", "square", "greedy"]
MONOTONE = ("max", "square", "greedy")  # those that no further token lowers


@dataclass(frozen=True, slots=True)
class Surprisals:
    """Sums over the surprisals u of an answer's tokens, nats.

    Attributes:
        count: of tokens.
        total: sum of u.
        squares: sum of u squared.
        steps: sum of squared differences of neighbours.
        greatest: u.
        excess: sum of squared distances from the least surprisal at each place.
        last: u of the last token.
    """

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    steps: float = 0.0
    greatest: float = 0.0
    excess: float = 0.0
    last: float = 0.0

    def plus(self, surprisal: float, least: float) -> Surprisals:
        """Return the sums with one more token; `least` is the least surprisal at its place."""
        step = (surprisal - self.last) ** 2 if self.count else 0.0
        return Surprisals(
            self.count + 1,
            self.total + surprisal,
            self.squares + surprisal**2,
            self.steps + step,
            max(self.greatest, surprisal),
            self.excess + (surprisal - least) ** 2,
            surprisal,
        )

    def value(self, regulariser: Regulariser) -> float:
        """Return a regulariser, at least 0."""
        if regulariser == "variance":
            return max(self.squares / self.count - (self.total / self.count) ** 2, 0.0)
        if regulariser == "local":
            return self.steps / max(self.count - 1, 1)
        return {"max": self.greatest, "square": self.squares, "greedy": self.excess}[regulariser]


def surprisals_after(each: Hypothesis) -> Surprisals:
    """Return the sums of a continuation, by its parent's, which are the parent's state."""
    assert each.parent is not None
    assert each.row is not None
    before: Surprisals = each.parent.state
    return before.plus(each.parent.logp - each.logp, -each.row.top_processed[0][1])
