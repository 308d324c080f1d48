"""From a network's outputs to numbers that mean what they say: temperature scaling and isotonic maps."""

from __future__ import annotations

from typing import Any, Literal

import torch

Law = Literal["chances", "choice", "values"]


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
        self.temperatures = torch.tensor(temperatures or [1.0])
        self.knots = [(torch.tensor(x), torch.tensor(y)) for x, y in knots or []]

    @property
    def settings(self) -> dict[str, Any]:
        """What to build it from: plain values."""
        knots = [(x.tolist(), y.tolist()) for x, y in self.knots]
        return {"law": self.law, "temperatures": self.temperatures.tolist(), "knots": knots}

    def __call__(self, outputs: torch.Tensor) -> torch.Tensor:
        """float32 [n, k] outputs -> [n, k] predictions."""
        if self.law == "values":
            return outputs
        scaled = outputs / self.temperatures
        if self.law == "choice":
            return scaled.softmax(-1)
        chances = scaled.sigmoid()
        if not self.knots:
            return chances
        return torch.stack([_interpolate(chances[:, i], x, y) for i, (x, y) in enumerate(self.knots)], 1)


def _interpolate(values: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Piecewise linear through the points, constant beyond them; x [m] rising, m >= 1."""
    if len(x) == 1:
        return y.expand_as(values)
    right = torch.searchsorted(x, values.contiguous()).clamp(1, len(x) - 1)
    left = right - 1
    part = ((values - x[left]) / (x[right] - x[left]).clamp_min(1e-12)).clamp(0.0, 1.0)
    return y[left] + part * (y[right] - y[left])
