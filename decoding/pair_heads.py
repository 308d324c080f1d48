"""Head that says how well a continuation goes with a prefix: a dual encoder on a frozen model's states."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from decoding.length_heads import Head


class PairHead(Head):
    """Dual encoder (paper #180, RankGen): one map for prefixes, one for continuations; the score is a dot product.

    Args:
        width: of the states that go in.
        size: of the vectors.
    """

    mean: torch.Tensor
    spread: torch.Tensor

    def __init__(self, width: int, size: int = 64) -> None:
        super().__init__()
        self._settings = {"width": width, "size": size}
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("spread", torch.ones(width))
        self.prefix = nn.Linear(width, size)
        self.continuation = nn.Linear(width, size)

    @property
    def settings(self) -> dict[str, Any]:
        """See `Head.settings`."""
        return self._settings

    def standardise(self, states: torch.Tensor) -> None:
        """Take mean and spread from float32 [n, width]; dimensions that hardly vary are not blown up."""
        self.mean.copy_(states.mean(0))
        self.spread.copy_(states.std(0).clamp_min(1e-3))

    def forward(self, prefixes: torch.Tensor, continuations: torch.Tensor) -> torch.Tensor:
        """float32 [n, width] and [m, width] -> scores [n, m]."""
        left = self.prefix((prefixes - self.mean) / self.spread)
        right = self.continuation((continuations - self.mean) / self.spread)
        scores: torch.Tensor = left @ right.T / right.shape[1] ** 0.5
        return scores
