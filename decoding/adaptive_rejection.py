"""Adaptive weighted rejection sampling: a permitted token, and an unbiased estimate of how probable permitted ones are.

Paper #78 (AWRS). Tokens are visited without replacement, in the order of their scores plus Gumbel noise, until one is
permitted: it follows the law among what is permitted. A few more questions make the weight, so that a constraint is
asked for some tokens where the exact weight would need all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import torch

from decoding.noise import Purpose, gumbel, noise_key, uniform
from decoding.processors.base import NEG_INF

PEAKED = 2.0 / 3.0  # from this probability of the best token on, drawing with replacement takes fewer questions
FEW = 32  # tokens that are sorted at first
MOST_REPEATS = 1e18
SMALL = 1e-6  # of probability that is left: then it is summed anew, for the sake of its digits

Permits = Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Token with its weight.

    Attributes:
        token: -1 where none was permitted.
        log_weight: an unbiased estimate of the probability of all permitted tokens, its logarithm; -inf: no token.
        asked: how many tokens the constraint was asked for.
    """

    token: int
    log_weight: float
    asked: int


class _Visits:
    """Visits of one token after another: keeps which were refused, and what probability is left.

    Args:
        scores: float32 [vocab], of which softmax is the law; -inf: never drawn.
        seed: of the noise.
        position: of the token.
        permits: whether a token may follow.
        max_rejects: refusals after which it gives up, those of repeated draws included; None: never.
    """

    def __init__(
        self, scores: torch.Tensor, seed: int, position: int, permits: Permits, max_rejects: int | None
    ) -> None:
        self.scores = scores.float().clone()
        self.probs = scores.double().softmax(-1)
        self.left = 1.0
        self.max_rejects = math.inf if max_rejects is None else max_rejects
        self._seed, self._position = seed, position
        self._permits = permits
        self._known: dict[int, bool] = {}

    @property
    def asked(self) -> int:
        return len(self._known)

    def permits(self, token: int) -> bool:
        """Ask once for each token."""
        if token not in self._known:
            self._known[token] = self._permits(token)
        return self._known[token]

    def refuse(self, token: int) -> None:
        """Take a token out: it is not visited again."""
        self.left -= float(self.probs[token])
        self.scores[token], self.probs[token] = NEG_INF, 0.0
        if self.left < SMALL:
            self.left = float(self.probs.sum())

    def order(self, lane: int) -> Iterator[int]:
        """Yield tokens that are left as if drawn without replacement; `lane` tells apart independent orders."""
        key = noise_key(self._seed, self._position, Purpose.SAMPLE, lane)
        keys = self.scores + gumbel([key], self.scores.numel(), self.scores.device)[0]
        for size in (min(FEW, keys.numel()), keys.numel()):
            best = keys.topk(size)
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                if value == NEG_INF:
                    return
                yield token
            keys = keys.index_fill(0, best.indices, NEG_INF)

    def repeats(self, lane: int) -> int:
        """Return how often refused tokens would have been drawn again before the next one, with replacement."""
        if self.left >= 1.0:
            return 0
        chance = uniform(noise_key(self._seed, self._position, Purpose.ACCEPT, lane))
        return int(min(math.log1p(-chance) / math.log1p(-self.left), MOST_REPEATS)) if self.left > 0.0 else 0


def draw(
    scores: torch.Tensor,
    permits: Permits,
    *,
    seed: int,
    position: int,
    max_accepts: int = 2,
    max_rejects: int | None = None,
) -> Drawn:
    """Draw a permitted token with a weight; the noise of its first visits is that of a masked draw.

    Args:
        scores: float32 [vocab], processed logits without the constraint; on any device.
        permits: whether a token may follow.
        seed: of the noise.
        position: of the token.
        max_accepts: permitted tokens that are wanted, at least 2: more of them make a weight that varies less.
        max_rejects: refusals after which there is no token and the weight is 0, at least 2; None: never. The weights
            stay unbiased.

    Returns:
        A token t with weight w, so that the expectation of w [t = v] is the law's probability of v for each permitted
        v, and 0 for others. Of estimates, the recursive one where the law is flat and two permitted tokens are enough.
    """
    visits = _Visits(scores.detach().cpu(), seed, position, permits, max_rejects)
    is_peaked = float(visits.probs.max()) >= PEAKED
    return geometric(visits, max_accepts) if max_accepts > 2 or is_peaked else recursive(visits)


def recursive(visits: _Visits) -> Drawn:
    """Estimate from the tokens up to the first permitted one, and the next behind it.

    Each refusal leaves its share of the rest. Of a permitted token's own share nothing is known but what the token
    behind it says: permitted, all of the rest counts; refused, its own share does.
    """
    log_weight, rejects, order = 0.0, 0, visits.order(0)
    token = next(order, None)
    while token is not None:
        following = next(order, None)
        share = min(float(visits.probs[token]) / visits.left, 1.0) if following is not None else 1.0
        if visits.permits(token):
            if rejects < visits.max_rejects - 1 and following is not None and not visits.permits(following):
                log_weight += _log(share)
            return Drawn(token, log_weight, visits.asked)
        rejects += 1
        visits.refuse(token)
        if rejects >= visits.max_rejects or share >= 1.0:
            break
        log_weight += math.log1p(-share)
        token = following
    return Drawn(-1, -math.inf, visits.asked)


def geometric(visits: _Visits, max_accepts: int) -> Drawn:
    """Estimate from draws with replacement, up to the last wanted permitted one.

    Only new tokens are asked for: the refused ones that would have been drawn again are drawn as numbers alone, which
    are geometric. Of `a` permitted draws of `n` the estimate is (a - 1) / (n - 1), or a / (n - 1) if refusals ended it.
    """
    result, accepts, rejects, lane = -1, 0, 0, count()
    for place in range(max_accepts):
        for token in visits.order(place):
            rejects += visits.repeats(next(lane)) if rejects else 0
            if rejects >= visits.max_rejects:
                break
            if visits.permits(token):
                accepts += 1
                result = token if result < 0 else result
                break
            rejects += 1
            visits.refuse(token)
        if accepts <= place:  # nothing is left, or too much was refused
            break
    if not accepts:
        return Drawn(-1, -math.inf, visits.asked)
    total = accepts + min(rejects, visits.max_rejects) - 1
    return Drawn(result, _log(min(max_accepts - 1, accepts) / total), visits.asked)


def _log(value: float) -> float:
    return math.log(value) if value > 0.0 else -math.inf
