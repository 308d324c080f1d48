"""From a network's outputs to numbers that mean what they say: temperature scaling and isotonic maps."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Law = Literal["chances", "choice", "values"]
Floats = npt.NDArray[np.float64]


class Scaling:
    """Turns outputs into predictions.

    Args:
        law: "chances": every output is the logit of a chance of its own; "choice": the logits of one choice; "values":
            numbers as they are.
        temperatures: what logits are divided by, one for each output; one is enough for a choice.
        knots: for chances, instead of a temperature: rising points (chance before, chance after) for each output,
            between which is interpolated; may be empty.
    """

    def __init__(
        self,
        law: Law,
        temperatures: list[float] | None = None,
        knots: list[tuple[list[float], list[float]]] | None = None,
    ) -> None:
        self.law = law
        self.temperatures = np.array(temperatures or [1.0])
        self.knots = [(np.array(x), np.array(y)) for x, y in knots or []]

    @property
    def settings(self) -> dict[str, Any]:
        """What to build it from: plain values."""
        knots = [(x.tolist(), y.tolist()) for x, y in self.knots]
        return {"law": self.law, "temperatures": self.temperatures.tolist(), "knots": knots}

    def __call__(self, outputs: npt.NDArray[np.floating[Any]]) -> Floats:
        """[..., k] outputs -> [..., k] predictions."""
        raw: Floats = outputs.astype(np.float64)
        if self.law == "values":
            return raw
        scaled = raw / self.temperatures
        if self.law == "choice":
            weights = np.exp(scaled - scaled.max(-1, keepdims=True))
            return np.asarray(weights / weights.sum(-1, keepdims=True))
        chances = 0.5 * (1.0 + np.tanh(0.5 * scaled))  # the logistic function, with no exponential to overflow
        if not self.knots:
            return np.asarray(chances)
        return np.stack([np.interp(chances[..., i], x, y) for i, (x, y) in enumerate(self.knots)], -1)
