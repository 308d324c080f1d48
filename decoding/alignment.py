"""Correlation of likelihood and utility over candidates, and which decoder it recommends (paper #26)."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

Recommended = Literal["likelihood", "rerank", "value"]
STRONG, NEGATIVE = 0.5, -0.1
MOST_INPUTS = 512


def pearson(x: Items[float], y: Items[float]) -> float:
    """Return the linear correlation; 0 where one of both does not vary."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    dx, dy = [each - mean_x for each in x], [each - mean_y for each in y]
    scale = math.sqrt(sum(a * a for a in dx) * sum(b * b for b in dy))
    return sum(a * b for a, b in zip(dx, dy, strict=True)) / scale if scale > 0.0 else 0.0


def spearman(x: Items[float], y: Items[float]) -> float:
    """Return the correlation of ranks; equal values share the mean of theirs."""
    return pearson(_ranks(x), _ranks(y))


def kendall(x: Items[float], y: Items[float]) -> float:
    """Return tau-b: concordant less discordant pairs, of those that are tied in neither; 0 where all are tied."""
    agree = tied_x = tied_y = 0
    pairs = list(combinations(range(len(x)), 2))
    for i, j in pairs:
        a, b = (x[i] > x[j]) - (x[i] < x[j]), (y[i] > y[j]) - (y[i] < y[j])
        agree += a * b
        tied_x += a == 0
        tied_y += b == 0
    scale = math.sqrt((len(pairs) - tied_x) * (len(pairs) - tied_y))
    return agree / scale if scale > 0.0 else 0.0


def _ranks(values: Items[float]) -> list[float]:
    order = sorted(values)
    first = {value: place for place, value in reversed(list(enumerate(order)))}
    last = {value: place for place, value in enumerate(order)}
    return [(first[value] + last[value]) / 2.0 for value in values]


def recommended(correlation: float) -> Recommended:
    """Return a decoder for a task: by likelihood, by reranking samples, or by the value alone."""
    if correlation >= STRONG:
        return "likelihood"
    return "value" if correlation <= NEGATIVE else "rerank"


@dataclass
class Alignment:
    """Likelihoods and utilities of the candidates of many inputs, the newest `MOST_INPUTS` of them.

    Attributes:
        inputs: likelihoods and utilities of each.
        taus: tau-b of each.
    """

    inputs: list[tuple[list[float], list[float]]] = field(default_factory=list)
    taus: list[float] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Host memory of the numbers, in bytes."""
        return 64 * sum(len(likelihoods) for likelihoods, _ in self.inputs)

    def add(self, likelihoods: Items[float], utilities: Items[float]) -> None:
        """Take the candidates of one input."""
        self.inputs = [*self.inputs[1 - MOST_INPUTS :], (list(likelihoods), list(utilities))]
        self.taus = [*self.taus[1 - MOST_INPUTS :], kendall(likelihoods, utilities)]

    @property
    def within(self) -> float:
        """Mean over inputs of tau-b: whether ranking by likelihood ranks by utility."""
        return sum(self.taus) / len(self.taus)

    @property
    def across(self) -> float:
        """Linear correlation over all candidates of all inputs."""
        likelihoods = [value for each, _ in self.inputs for value in each]
        return pearson(likelihoods, [value for _, each in self.inputs for value in each])
