"""LayerSkip: what a model leaves out in training and where it is judged, so that it can be left early."""

from __future__ import annotations

import random
from dataclasses import dataclass

MIN_LAYERS = 3  # the exit behind the first layer has no weight, so that fewer layers have no early exit


@dataclass(frozen=True)
class LayerSkip:
    """Layer dropout and early-exit losses (arXiv 2404.16710), as the paper has them for a model trained further.

    Deeper layers are left out more often, the first never. The last layer is judged at every step; of the others
    every `every`-th, and at the next step those one deeper (its rotational curriculum). Exits of a step share the loss
    by the paper's e(l): deeper ones count more, the last most.

    Attributes:
        dropout: how often the last layer is left out for a row.
        scale: weight of early exits.
        every: distance of the early exits of one step, in layers.
    """

    dropout: float = 0.1
    scale: float = 0.2
    every: int = 4

    def __post_init__(self) -> None:
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")
        if self.scale <= 0.0 or self.every < 1:
            raise ValueError(f"scale must be above 0 and every at least 1, got {self.scale} and {self.every}")

    def rates(self, num_layers: int) -> list[float]:
        """How often each layer is left out for a row, the first layer first."""
        return [self.dropout * (2.0 ** (layer / (num_layers - 1)) - 1.0) for layer in range(num_layers)]

    def kept(self, num_layers: int, num_rows: int, draw: str) -> list[list[bool]]:
        """Which layers run for which rows, [layers][rows]; equal for equal names of a draw."""
        rng = random.Random(draw)
        return [[rng.random() >= rate for _ in range(num_rows)] for rate in self.rates(num_layers)]

    def weights(self, num_layers: int, step: int) -> dict[int, float]:
        """Parts of a step's loss by the number of layers before the exit; they add up to 1."""
        last = num_layers - 1
        turn = (layer for layer in range(1, last) if layer % self.every == step % self.every)
        scales = {layer + 1: self.scale * layer * (layer + 1) / 2 for layer in turn}
        scales[num_layers] = last + self.scale * last * (last - 1) / 2
        total = sum(scales.values())
        return {layer: scale / total for layer, scale in scales.items()}
