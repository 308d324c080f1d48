"""Trained heads that say with which temperature and top-p a token is drawn (paper #22, AutoDeco)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from decoding.length_heads import Head
from decoding.processors.base import row_entropy, row_sums

LEAST_TEMPERATURE = 0.01
STATISTICS = 4
TOP = 5


class SamplingHeads(Head):
    """Two small networks on the last hidden state: the temperature, between 0 and 2, and top-p, between 0 and 1.

    The second also sees the first's answer, and statistics of the distribution at that temperature.

    Args:
        width: of the hidden states.
        inner: width of their hidden layers.

    Attributes:
        model: digest of the model that they were trained for.
    """

    model = ""

    def __init__(self, width: int, inner: int = 256) -> None:
        super().__init__()
        self.temperature = nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, 1))
        self.top_p = nn.Sequential(nn.Linear(width + 1 + STATISTICS, inner), nn.ReLU(), nn.Linear(inner, 1))

    @property
    def settings(self) -> dict[str, Any]:
        """See `Head.settings`."""
        first: Any = self.temperature[0]
        return {"width": first.in_features, "inner": first.out_features}

    def forward(self, states: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Temperature and top-p of each row, [n, 1] each.

        Args:
            states: [n, width] before the head, after the last norm.
            logits: float32 [n, vocab], raw.
        """
        temperature = 2.0 * self.temperature(states).sigmoid()
        seen = temperature.detach()
        shape = statistics(logits / seen.to(logits.dtype).clamp(min=LEAST_TEMPERATURE))
        features = torch.cat([states, seen, shape.to(states.dtype)], -1)
        return temperature, self.top_p(features).sigmoid()


def statistics(logits: torch.Tensor) -> torch.Tensor:
    """Describe distributions, each as in every batch: [n, vocab] -> [n, 4].

    Greatest probability, entropy in nats, variance of the probabilities, mass of the best five.
    """
    probs = logits.softmax(-1)
    best = probs.topk(min(TOP, probs.shape[-1]), dim=-1).values
    together = best[:, :1]
    for place in range(1, best.shape[1]):
        together = together + best[:, place : place + 1]
    entropy = row_entropy(probs)
    spread = row_sums((probs - row_sums(probs) / probs.shape[-1]).square()) / max(probs.shape[-1] - 1, 1)
    return torch.cat([best[:, :1], entropy, spread, together], -1)
