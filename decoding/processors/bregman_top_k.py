"""Bregman top-k: how many tokens stay follows from each distribution, and how they share the rest (paper #87)."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, FiniteFloat

from decoding.processors.base import NEG_INF, Batch, LogitsProcessor, Stage
from turnout.registry import MethodParams

BISECTIONS = 50
NEWTON_STEPS, TOLERANCE = 50, 1e-15
MOST_KEPT = 1024
Probs = npt.NDArray[np.float64]


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
            problem = Problem(best.values.cpu().numpy(), probs[row].double(), part.params)
            q = torch.from_numpy(problem.solve(problem.best_size())).to(logits.device)
            kept[row, best.indices[: len(q)]] = q.log().float()
        return kept


class Problem:
    """One distribution to be cut.

    Args:
        best: its greatest probabilities, descending, [most].
        whole: all of them, float64 [vocab].
        params: the decoder's.
    """

    def __init__(self, best: Probs, whole: torch.Tensor, params: BregmanTopKParams) -> None:
        self._best, self._params = best[best > 0], params
        alpha = params.alpha
        # What a token adds to the divergence where it is left out; KL's is in the term of the kept mass.
        self._scale = 0.0 if alpha == 1.0 else 1 / (alpha if params.form == "primal" else alpha * (alpha - 1))
        self._tail = float((whole**alpha).sum()) * self._scale
        self._spared = (self._best**alpha).cumsum() * self._scale

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
            divergence = -math.log(p.sum())
        else:
            near, far = (q, p) if self._params.form == "primal" else (p, q)
            slope = far ** (alpha - 1) / (alpha - 1)
            inside = (near**alpha - far**alpha) / (alpha * (alpha - 1)) - slope * (near - far)
            divergence = inside.sum() + self._tail - self._spared[size - 1]
        return float(divergence) + self._params.cost * size

    def solve(self, size: int) -> Probs:
        """q on that many tokens, [size]; it sums to 1."""
        p, alpha = self._best[:size], self._params.alpha
        if alpha == 1.0:
            return _summing_to_one(p)
        if self._params.form == "primal":
            return _normalised(lambda nu: (p ** (alpha - 1) + nu) ** (1 / (alpha - 1)))
        return _normalised(lambda nu: _dual(p, nu, alpha))


def _normalised(at: Callable[[float], Probs]) -> Probs:
    """The values of a family, growing with nu >= 0, that sum to 1; they are divided by their sum at last."""
    low, high = 0.0, 1.0
    with np.errstate(over="ignore"):  # near a = 1 a nu that is too large gives infinity, which is too much, too
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if at(middle).sum() < 1.0 else (low, middle)
    found = at((low + high) / 2)
    return _summing_to_one(found)


def _summing_to_one(values: Probs) -> Probs:
    made: Probs = values / values.sum()
    return made


def _dual(p: Probs, nu: float, alpha: float) -> Probs:
    """q >= p with q^(a-2) (q - p) = nu.

    By Newton's method from the side on which it never oversteps: the left side grows with q and is concave below a = 2,
    so from q = p; it is convex above, so from a q that is too large.
    """
    q = p if alpha < 2 else p + nu ** (1 / (alpha - 1))
    for _ in range(NEWTON_STEPS):
        slope = (alpha - 1) * q ** (alpha - 2) - (alpha - 2) * p * q ** (alpha - 3)
        step = (q ** (alpha - 2) * (q - p) - nu) / slope
        q = q - step
        if np.abs(step).max() < TOLERANCE:
            break
    return np.maximum(q, p)


PART = BregmanTopK
