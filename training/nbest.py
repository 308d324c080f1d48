"""Tuning of the weights of `nbest` on a development set: coordinate search for the utility of what is shown."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

GRID = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
ROUNDS = 8


@dataclass(frozen=True)
class Scored:
    """Candidates of one input.

    Attributes:
        scores: [n, k] values of each candidate, by term.
        utilities: [n] how good each candidate is, by the metric that is tuned for.
    """

    scores: tuple[tuple[float, ...], ...]
    utilities: tuple[float, ...]


def shown_utility(inputs: Items[Scored], weights: Items[float]) -> float:
    """Return the mean utility of the candidates with the greatest weighted sums, of equal ones the first."""
    total = 0.0
    for each in inputs:
        sums = [sum(w * s for w, s in zip(weights, row, strict=True)) for row in each.scores]
        total += each.utilities[sums.index(max(sums))]
    return total / len(inputs)


def tune_weights(inputs: Items[Scored]) -> tuple[list[float], float]:
    """Search for weights, one term at a time, until none of `GRID`, or its negatives, is better.

    Args:
        inputs: at least one.

    Returns:
        The weights, and the mean utility they reach.
    """
    weights = [1.0] * len(inputs[0].scores[0])
    reached = shown_utility(inputs, weights)
    for _ in range(ROUNDS):
        before = reached
        for term in range(len(weights)):
            for value in (*GRID, *(-each for each in GRID[1:])):
                tried = [*weights[:term], value, *weights[term + 1 :]]
                if (found := shown_utility(inputs, tried)) > reached:
                    weights, reached = tried, found
        if reached == before:
            break
    return weights, reached
