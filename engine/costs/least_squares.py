"""Least squares with coefficients that may not be negative: costs only ever add up."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

ROUNDS = 6
# Relative residuals beyond this count by their size, not its square: a disturbed measurement moves the fit little.
HUBER = 0.25


def nonnegative(features: Floats, values: Floats) -> Floats:
    """The x >= 0 that minimises |features @ x - values| (Lawson and Hanson's active set method).

    Args:
        features: [N, F].
        values: [N].

    Returns:
        [F].
    """
    scale = np.linalg.norm(features, axis=0)
    scale[scale == 0] = 1.0
    matrix = features / scale
    found = np.zeros(matrix.shape[1])
    free = np.zeros(matrix.shape[1], dtype=bool)
    tolerance = 1e-10 * float(np.abs(matrix.T @ values).max(initial=1e-300))
    for _ in range(3 * matrix.shape[1]):
        gradient = matrix.T @ (values - matrix @ found)
        gradient[free] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= tolerance:
            break
        free[best] = True
        found = _descend(matrix, values, found, free)
    unscaled: Floats = found / scale
    return unscaled


def _descend(matrix: Floats, values: Floats, found: Floats, free: npt.NDArray[np.bool_]) -> Floats:
    """Solve for the free coefficients, fixing at zero, in place in `free`, those that would become negative."""
    while True:
        trial = np.zeros_like(found)
        trial[free] = np.linalg.lstsq(matrix[:, free], values, rcond=None)[0]
        negative = free & (trial <= 0)
        if not negative.any():
            return trial
        room = found[negative] / np.maximum(found[negative] - trial[negative], 1e-300)
        found = found + float(room.min()) * (trial - found)
        free &= ~negative | (found > 1e-14)


def robust_nonnegative(features: Floats, values: Floats) -> tuple[Floats, float]:
    """As `nonnegative`, for the relative error, with Huber's weights (iteratively reweighted).

    Args:
        features: [N, F].
        values: [N], all positive.

    Returns:
        [F], and the mean loss.
    """
    relative, ones = features / values[:, None], np.ones_like(values)
    weights = ones
    found = np.zeros(features.shape[1])
    error = ones
    for _ in range(ROUNDS):
        root = np.sqrt(weights)
        found = nonnegative(relative * root[:, None], root)
        error = np.abs(relative @ found - 1.0)
        weights = HUBER / np.maximum(error, HUBER)
    return found, float(np.where(error <= HUBER, error**2, 2 * HUBER * error - HUBER**2).mean())
