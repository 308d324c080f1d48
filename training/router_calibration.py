"""Making a probe's chances true on prompts it was not fitted to: temperature scaling, or an isotonic map."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from router.difficulty.scaling import Law, Scaling
from turnout.errors import invalid

Way = Literal["temperature", "isotonic"]
_STEPS = 80
_COLDEST, _HOTTEST = 0.05, 50.0


def fit_scaling(way: Way, law: Law, outputs: torch.Tensor, labels: torch.Tensor) -> Scaling:
    """What turns outputs into predictions.

    Args:
        way: temperature keeps the order of prompts and needs few of them; isotonic fits any rising map.
        law: see `Scaling`.
        outputs: float32 [n, k] of the network, on calibration prompts.
        labels: float32 [n, k]: chances, or for a choice the share of each label.

    Raises:
        TurnoutError: INVALID_ARGUMENT: isotonic for anything but chances.
    """
    if law == "values":
        return Scaling(law)
    if law == "choice":
        if way != "temperature":
            raise invalid("calibration", "must be temperature for a choice between labels")
        return Scaling(law, [temperature(outputs, labels, law)])
    if way == "temperature":
        return Scaling(law, [temperature(outputs[:, [i]], labels[:, [i]], law) for i in range(outputs.shape[1])])
    chances = outputs.sigmoid().double().numpy()
    knots = [isotonic(chances[:, i], labels[:, i].double().numpy()) for i in range(outputs.shape[1])]
    return Scaling(law, knots=knots)


def temperature(outputs: torch.Tensor, labels: torch.Tensor, law: Law) -> float:
    """What logits must be divided by to make the labels likeliest; within 0.05 to 50.

    The loss is convex in the inverse, so its lowest point is closed in on from both sides. Labels that are all alike
    say nothing about how sure to be (the surest would always be likeliest), so they leave the logits as they are.
    """
    if bool((labels == labels[:1]).all()):
        return 1.0
    low, high = 1.0 / _HOTTEST, 1.0 / _COLDEST

    def loss(inverse: float) -> float:
        scaled = outputs.double() * inverse
        if law == "choice":
            return float(-(labels * scaled.log_softmax(-1)).sum())
        return float(torch.nn.functional.binary_cross_entropy_with_logits(scaled, labels.double()))

    for _ in range(_STEPS):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        if loss(left) <= loss(right):
            high = right
        else:
            low = left
    return 2.0 / (low + high)


def isotonic(scores: NDArray[np.float64], labels: NDArray[np.float64]) -> tuple[list[float], list[float]]:
    """The rising map nearest to the labels, as the points between which it is straight.

    Args:
        scores: [n] chances before.
        labels: [n] from 0 to 1.

    Returns:
        Chances before and after at each point; between two points of one height none is needed.
    """
    from sklearn.isotonic import IsotonicRegression

    fitted = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip").fit(scores, labels)
    return fitted.X_thresholds_.tolist(), fitted.y_thresholds_.tolist()
