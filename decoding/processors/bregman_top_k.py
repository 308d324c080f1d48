"""Bregman top-k: how many tokens stay follows from each distribution, and how they share the rest (paper #87)."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field, FiniteFloat

from decoding.processors.base import NEG_INF, Batch, LogitsProcessor, Stage
from turnout.registry import MethodParams

BISECTIONS = 50
MOST_KEPT = 1024


class BregmanTopKParams(MethodParams):
    """Parameters."""

    cost: Annotated[FiniteFloat, Field(ge=0.0, le=1.0, description="price of a kept token; 0 is off")] = 0.01
    alpha: Annotated[
        FiniteFloat, Field(ge=1.0, le=4.0, description="of the divergence; 1: KL, plain renormalising")
    ] = 1.5
    form: Annotated[
        Literal["primal", "dual"], Field(description="which side of the divergence the kept tokens are on")
    ] = "primal"


class BregmanTopK(LogitsProcessor):
    """Bregman decoders (paper #87): q of least D(q, p) + cost * |support of q|, by phi(x) = x^a / (a (a - 1)).

    The support is the k most probable tokens, and the cost is convex in k, so k is found by bisection; at most 1,024.
    The tokens kept get q_i with q_i^(a-1) - p_i^(a-1) equal for all of them (primal), or q_i^(a-2) (q_i - p_i) (dual).
    """

    Params = BregmanTopKParams
    params: BregmanTopKParams
    papers = (87,)
    stage = Stage.TRUNCATE
    keeps_best = True
    off: ClassVar = {"cost": 0.0}

    @classmethod
    def apply(cls, logits: torch.Tensor, parts: Rows[Self], batch: Batch) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        kept = torch.full_like(logits, NEG_INF)
        probs = logits.softmax(-1)
        for row, part in enumerate(parts):
            if part.params.cost == 0.0:
                kept[row] = logits[row]
                continue
            best = probs[row].double().topk(min(MOST_KEPT, logits.shape[-1]))
            problem = Problem(best.values, probs[row].double(), part.params)
            q = problem.solve(problem.best_size())
            kept[row, best.indices[: len(q)]] = q.log().float()
        return kept


class Problem:
    """One distribution to be cut.

    Args:
        best: its greatest probabilities, descending, float64 [most].
        whole: all of them, float64 [vocab].
        params: the decoder's.
    """

    def __init__(self, best: torch.Tensor, whole: torch.Tensor, params: BregmanTopKParams) -> None:
        self._best, self._params = best[best > 0], params
        self._tail = self._cut(whole).sum()
        self._spared = self._cut(self._best).cumsum(0)

    def _cut(self, probs: torch.Tensor) -> torch.Tensor:
        """What each token adds to the divergence where it is left out; KL's is in the term of the kept mass."""
        alpha = self._params.alpha
        if alpha == 1.0:
            return torch.zeros_like(probs)
        return probs**alpha / (alpha if self._params.form == "primal" else alpha * (alpha - 1))

    def best_size(self) -> int:
        """The number of tokens of least cost; of equal ones the least."""
        most = len(self._best)
        low = high = 1
        while high < most and self.cost(high + 1) < self.cost(high):  # few are kept in most rows
            low, high = high + 1, min(2 * high, most)
        while low < high:
            middle = (low + high) // 2
            if self.cost(middle + 1) < self.cost(middle):
                low = middle + 1
            else:
                high = middle
        return low

    def cost(self, size: int) -> float:
        """Divergence at the best q on that many tokens, and their price."""
        p, q, alpha = self._best[:size], self.solve(size), self._params.alpha
        if alpha == 1.0:
            divergence = -p.sum().log()
        else:
            near, far = (q, p) if self._params.form == "primal" else (p, q)
            slope = far ** (alpha - 1) / (alpha - 1)
            inside = (near**alpha - far**alpha) / (alpha * (alpha - 1)) - slope * (near - far)
            divergence = inside.sum() + self._tail - self._spared[size - 1]
        return float(divergence) + self._params.cost * size

    def solve(self, size: int) -> torch.Tensor:
        """q on that many tokens, float64 [size]; it sums to 1."""
        p, alpha = self._best[:size], self._params.alpha
        if alpha == 1.0:
            return p / p.sum()
        if self._params.form == "primal":
            return _normalised(lambda nu: (p ** (alpha - 1) + nu) ** (1 / (alpha - 1)))
        return _normalised(lambda nu: _dual(p, nu, alpha))


def _normalised(at: Callable[[float], torch.Tensor]) -> torch.Tensor:
    """The values of a family, growing with nu >= 0, that sum to 1; they are divided by their sum at last."""
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if float(at(middle).sum()) < 1.0 else (low, middle)
    found = at((low + high) / 2)
    return found / found.sum()


def _dual(p: torch.Tensor, nu: float, alpha: float) -> torch.Tensor:
    """q >= p with q^(a-2) (q - p) = nu, by bisection: it grows in q."""
    low, high = p, p + 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        below = middle ** (alpha - 2) * (middle - p) < nu
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


PART = BregmanTopK
