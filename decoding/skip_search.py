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
    """Paper #153, SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration.

    A set skips a fixed number of the sub-layers between the first and the last layer. Trials are random, and every
    25th is the one that the upper confidence bound of a Gaussian process over all trials favours. The search ends when
    the best set agrees with the model nearly always, after many trials without gain, or after many trials.

    A trial is one stretch of one request's text, and on a text that repeats itself any set predicts all of it. So the
    set in use is scored on the next requests' texts too, also when the search has ended. A set's score is the mean over
    the texts it was scored on, and the set in use is the one of the highest score. Where a check lowers the score to
    `good_enough` or below, or puts another set into use, more sets are tried, unless the search has made
    `most_trials` trials: then only sets that were tried can still come into use.

    Args:
        num_layers: of the model, at least 3.
        share: of the sub-layers between the first and the last layer that is skipped.
        seed: of the random trials.
        good_enough: score above which nothing more is tried.
        most_without_gain: trials in a row without a better set, after which nothing more is tried.
        most_trials: after which nothing more is tried.
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
        self._num_trials = 0
        self._without_gain = 0
        self._first = self._every_second_layer()
        # One entry for each set that was tried: itself, its mean score, and the number of texts that is over.
        self._places: dict[frozenset[int], int] = {}
        self._trials: list[Bits] = []
        self._scores: list[float] = []
        self._texts: list[int] = []
        self._best: int | None = None  # the entry of the set in use

    @property
    def best(self) -> frozenset[int]:
        """The set in use, as sub-layer indices."""
        return self._set(self._first if self._best is None else self._trials[self._best])

    @property
    def score(self) -> float:
        """Mean share of tokens that the set in use predicted as the model wrote them; -1.0 before the first trial."""
        return -1.0 if self._best is None else self._scores[self._best]

    @property
    def done(self) -> bool:
        """True if nothing more is tried."""
        good_enough, most_without_gain, most_trials = self._limits
        return (
            self._count == 0
            or self.score > good_enough
            or self._without_gain >= most_without_gain
            or self._num_trials >= most_trials
        )

    @property
    def doubtful(self) -> bool:
        """True if the set in use is to be scored on a further request's text."""
        return self._best is not None and self._texts[self._best] < CHECKS

    @property
    def advice_is_next(self) -> bool:
        """True if the set to try next is the process's, for which `ADVISER` is imported."""
        return self._num_trials > 0 and self._num_trials % ADVICE_EVERY == 0

    def propose(self) -> frozenset[int]:
        """The set to try next: the first is the one in use."""
        if self._num_trials == 0:
            return self.best
        return self._set(self._advised() if self.advice_is_next else self._any())

    def report(self, tried: frozenset[int], score: float | None) -> None:
        """Enter how well a proposed set predicted; several requests may be trying theirs at once.

        Args:
            tried: the set.
            score: share of the tokens that it predicted; None: it was scored on this text before.
        """
        self._num_trials += 1
        self._without_gain += 1
        if score is not None:
            before = self.score
            self._enter(tried, score)
            if self.score > before:
                self._without_gain = 0

    def check(self, tried: frozenset[int], score: float) -> None:
        """Enter how well the set in use predicted another text; nothing where another set is in use by now."""
        if tried == self.best:
            self._enter(tried, score)

    def _enter(self, tried: frozenset[int], score: float) -> None:
        """Take a score into the mean of its set, and use the best set from now on."""
        place = self._places.setdefault(tried, len(self._trials))
        if place == len(self._trials):
            bits = np.zeros(self._size, dtype=np.int8)
            bits[[index - 2 for index in tried]] = 1
            self._trials.append(bits)
            self._scores.append(score)
            self._texts.append(1)
        else:
            self._texts[place] += 1
            self._scores[place] += (score - self._scores[place]) / self._texts[place]
        best = max(range(len(self._scores)), key=self._scores.__getitem__)
        if best != self._best:
            self._best, self._without_gain = best, 0

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
