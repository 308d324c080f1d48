"""The search for sub-layers a model can do without: random trials, and a Gaussian process's advice."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.int8]

ADVICE_EVERY = 25
ADVISER = "sklearn.gaussian_process"
CANDIDATES = 256
# A process over every trial would take longer to fit than its advice is worth.
MOST_FITTED = 200
KAPPA = 2.5
CHECKS = 8  # requests on whose text the set in use is scored
NOISE = 1e-2


class SkipSearch:
    """Seed 153, SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration.

    A set skips a fixed number of the sub-layers between the first and the last layer. Trials are random, and every
    25th is the one that the upper confidence bound of a Gaussian process over all trials favours. The search ends when
    the best set agrees with the model nearly always, after many trials without gain, or after many trials.

    A trial is one stretch of one request's text, and on a text that repeats itself any set predicts all of it. So the
    set in use is scored on the next requests' texts too, also when the search has ended; its score is the mean, and
    the search goes on where that is lower than what ended it.

    Args:
        num_layers: of the model, at least 3.
        share: of the sub-layers between the first and the last layer that is skipped.
        seed: of the random trials.

    Attributes:
        best: the set in use, as sub-layer indices.
        score: of the best set: mean share of tokens its draft predicted as the model wrote them; -1.0 before the first.
    """

    def __init__(
        self,
        num_layers: int,
        share: float,
        seed: int = 0,
        good_enough: float = 0.95,
        most_without_gain: int = 300,
        most_trials: int = 1000,
    ) -> None:
        self._size = 2 * (num_layers - 2)
        self._count = int(self._size * share)
        self._random = np.random.default_rng(seed)
        self._limits = (good_enough, most_without_gain, most_trials)
        self._trials: list[Bits] = []
        self._scores: list[float] = []
        self._without_gain = 0
        self._best = self._every_second_layer()
        self.score = -1.0
        self._scored = 0  # times the set in use was

    @property
    def best(self) -> frozenset[int]:
        """The set in use."""
        return self._set(self._best)

    @property
    def done(self) -> bool:
        """Whether nothing more is tried."""
        good_enough, most_without_gain, most_trials = self._limits
        return (
            self._count == 0
            or self.score > good_enough
            or self._without_gain >= most_without_gain
            or len(self._trials) >= most_trials
        )

    @property
    def doubtful(self) -> bool:
        """Whether the set in use is to be scored on a further request's text."""
        return 0 < self._scored < CHECKS

    @property
    def advice_is_next(self) -> bool:
        """Whether the set to try next is the process's, for which `ADVISER` is imported."""
        return len(self._trials) > 0 and len(self._trials) % ADVICE_EVERY == 0

    def propose(self) -> frozenset[int]:
        """The set to try next: the first is the one in use."""
        if not self._trials:
            return self.best
        return self._set(self._advised() if self.advice_is_next else self._any())

    def report(self, tried: frozenset[int], score: float) -> None:
        """How well a proposed set predicted; several requests may be trying theirs at once."""
        trial = np.zeros(self._size, dtype=np.int8)
        trial[[index - 2 for index in tried]] = 1
        self._trials.append(trial)
        self._scores.append(score)
        if score > self.score:
            self._best, self.score, self._without_gain, self._scored = trial, score, 0, 1
        else:
            self._without_gain += 1

    def check(self, tried: frozenset[int], score: float) -> None:
        """Enter how well the set in use predicted another text; nothing where another set is in use by now."""
        if tried == self.best:
            self._scored += 1
            self.score += (score - self.score) / self._scored

    def _every_second_layer(self) -> Bits:
        """Both sub-layers of every second layer, as many as there may be."""
        bits = np.zeros(self._size, dtype=np.int8)
        order = [*(i for i in range(self._size) if i // 2 % 2 == 0), *(i for i in range(self._size) if i // 2 % 2)]
        bits[order[: self._count]] = 1
        return bits

    def _any(self) -> Bits:
        bits = np.zeros(self._size, dtype=np.int8)
        bits[self._random.permutation(self._size)[: self._count]] = 1
        return bits

    def _advised(self) -> Bits:
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import Matern

        process = GaussianProcessRegressor(Matern(nu=2.5), alpha=NOISE, optimizer=None, normalize_y=True)
        process.fit(np.stack(self._trials[-MOST_FITTED:]), np.array(self._scores[-MOST_FITTED:]))
        candidates = np.stack([self._any() for _ in range(CANDIDATES)])
        mean, deviation = process.predict(candidates, return_std=True)
        advised: Bits = candidates[int((mean + KAPPA * deviation).argmax())]
        return advised

    def _set(self, bits: Bits) -> frozenset[int]:
        return frozenset(int(index) + 2 for index in np.flatnonzero(bits))
