"""How good predicted probabilities are: ranking, calibration, and loss against a constant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NUM_BINS = 10


@dataclass(frozen=True)
class Calibration:
    """Quality of predictions on examples that were not trained on.

    Attributes:
        num_examples: how many.
        base_rate: mean label.
        auc: chance that a positive is ranked above a negative, ties half; 0.5 where there is only one kind.
        calibration_error: mean gap between prediction and label over ten equal bins of the prediction.
        loss: cross-entropy, nats.
        constant_loss: that of always predicting the training examples' mean label.
    """

    num_examples: int
    base_rate: float
    auc: float
    calibration_error: float
    loss: float
    constant_loss: float


def calibration(scores: Floats, labels: Floats, constant: float) -> Calibration:
    """Measure predictions.

    Args:
        scores: [n] predicted probabilities.
        labels: [n] from 0 to 1; one in between counts as that share of a positive.
        constant: mean label of the training examples.
    """
    return Calibration(
        num_examples=len(scores),
        base_rate=float(labels.mean()),
        auc=auc(scores, labels),
        calibration_error=calibration_error(scores, labels),
        loss=cross_entropy(scores, labels),
        constant_loss=cross_entropy(np.full_like(scores, constant), labels),
    )


def auc(scores: Floats, labels: Floats) -> float:
    """Area under the ROC curve, with labels as weights of positives and their rest as weights of negatives."""
    values, place = np.unique(scores, return_inverse=True)
    positive = np.bincount(place, weights=labels, minlength=len(values))
    negative = np.bincount(place, weights=1.0 - labels, minlength=len(values))
    pairs = positive.sum() * negative.sum()
    if pairs == 0.0:
        return 0.5
    below = np.cumsum(negative) - negative
    return float((positive * (below + 0.5 * negative)).sum() / pairs)


def calibration_error(scores: Floats, labels: Floats) -> float:
    """Expected calibration error over `NUM_BINS` bins of equal width."""
    bins = np.minimum((scores * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    gaps = np.bincount(bins, weights=scores - labels, minlength=NUM_BINS)
    return float(np.abs(gaps).sum() / len(scores))


def cross_entropy(scores: Floats, labels: Floats) -> float:
    """Mean cross-entropy of predictions, nats."""
    safe: Any = np.clip(scores, 1e-7, 1.0 - 1e-7)
    return float(-(labels * np.log(safe) + (1.0 - labels) * np.log1p(-safe)).mean())
