"""Which draft lengths are worth their time: replay of mined rounds under a cost model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from decoding.model import ModelPool
from training.length_data import Examples

Ints = NDArray[np.int64]

THRESHOLDS = tuple(np.linspace(0.0, 0.95, 39).tolist())


@dataclass(frozen=True)
class Costs:
    """Wall time of a round's forwards, in any unit.

    Attributes:
        draft: of one draft step.
        verify: [depth + 1] of verifying a draft, by its length in tokens.
    """

    draft: float
    verify: tuple[float, ...]

    @classmethod
    def of(cls, models: ModelPool, depth: int, context: int) -> Costs:
        """As the models predict for one sequence; a draft step taken as a tenth of a verification where they cannot.

        Args:
            models: small drafts, large verifies.
            depth: deepest draft.
            context: tokens before it.
        """
        draft = models.small.forward_seconds(1, context, 1)
        verify = [models.large.forward_seconds(k + 1, (k + 1) * context, 1) for k in range(depth + 1)]
        if draft <= 0.0 or min(verify) <= 0.0:
            return cls(0.1, (1.0,) * (depth + 1))
        return cls(draft, tuple(verify))


@dataclass(frozen=True)
class Replay:
    """Rounds as they were mined.

    Attributes:
        scores: [rounds, depth] the predictor's score of each drafted token; 0 beyond the draft.
        drafted: [rounds] tokens drafted.
        accepted: [rounds] of them accepted: also the lengths an oracle drafts, which ends before the first mismatch.
    """

    scores: NDArray[np.float64]
    drafted: Ints
    accepted: Ints

    @classmethod
    def of(cls, examples: Examples, scores: torch.Tensor) -> Replay:
        """Group examples, whose tokens stand in draft order, into rounds; scores: [n]."""
        key = torch.stack([examples.prompts, examples.rounds], 1)
        _, place, counts = torch.unique_consecutive(key, dim=0, return_inverse=True, return_counts=True)
        rounds, drafted = place.numpy(), counts.numpy()
        first = np.cumsum(drafted) - drafted
        table = np.zeros((len(drafted), int(drafted.max(initial=0))))
        table[rounds, np.arange(len(rounds)) - first[rounds]] = scores.double().numpy()
        accepted = np.bincount(rounds, weights=examples.labels.numpy(), minlength=len(drafted)).astype(np.int64)
        return cls(table, drafted, accepted)

    def lengths(self, threshold: float, most: int) -> Ints:
        """[rounds] draft lengths of a policy that ends below the first token with a score under the threshold."""
        low = self.scores < threshold
        stopped: Ints = np.where(low.any(1), low.argmax(1) + 1, self.scores.shape[1])
        lengths: Ints = np.minimum(np.minimum(stopped, most), self.drafted)
        return lengths

    def fixed(self, length: int) -> Ints:
        """[rounds] one length, where the round had room for it."""
        return np.minimum(length, self.drafted)

    def speed(self, lengths: Ints, costs: Costs) -> float:
        """Emitted tokens per unit of time, with drafts of these lengths."""
        tokens = (np.minimum(lengths, self.accepted) + 1).sum()
        return float(tokens / (lengths * costs.draft + np.array(costs.verify)[lengths]).sum())


@dataclass(frozen=True)
class Tuned:
    """Gain of a threshold, and of those below and above it; speeds in tokens per unit of time.

    Attributes:
        threshold: least score to draft on.
        most: deepest draft.
        static_length: the best fixed length; tuned like threshold and depth.
        speed: with threshold and depth.
        static_speed: with the best fixed length.
        plain_speed: without drafts.
        oracle_speed: drafting exactly what will be accepted: an upper bound for every policy.
    """

    threshold: float
    most: int
    static_length: int
    speed: float
    static_speed: float
    plain_speed: float
    oracle_speed: float


def tune(choose: Replay, report: Replay, costs: Costs) -> Tuned:
    """Choose threshold, depth and the best fixed length for time on some rounds; report on others."""
    depth = choose.scores.shape[1]
    settings = [(threshold, most) for most in range(1, depth + 1) for threshold in THRESHOLDS]
    threshold, most = max(settings, key=lambda each: choose.speed(choose.lengths(*each), costs))
    static = max(range(1, depth + 1), key=lambda length: choose.speed(choose.fixed(length), costs))
    return Tuned(
        threshold=threshold,
        most=most,
        static_length=static,
        speed=report.speed(report.lengths(threshold, most), costs),
        static_speed=report.speed(report.fixed(static), costs),
        plain_speed=report.speed(report.fixed(0), costs),
        oracle_speed=report.speed(report.accepted, costs),
    )
