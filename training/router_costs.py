"""What both models' answers to a prompt cost, and what there is to learn of how much more the large one's does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from decoding.model import ModelPool
from training.router_measures import Floats
from training.router_outcomes import ROLES, Outcomes, Role
from turnout.cost import paper_cost


@dataclass(frozen=True)
class Costs:
    """Costs of answers, parameters times tokens.

    Attributes:
        cheap: [n] of the small model's.
        dear: [n] of the large model's.
        known: whether the outcomes say how many tokens each took; else all prompts cost the same.
    """

    cheap: Floats
    dear: Floats
    known: bool

    @classmethod
    def of(cls, models: ModelPool, outcomes: Outcomes) -> Costs:
        """Of all rows."""
        sizes: dict[Role, float] = {role: models.token_cost(role) for role in ROLES}
        tokens = {role: [row.mean(role, "tokens") for row in outcomes.rows] for role in ROLES}
        if None in tokens["small"] or None in tokens["large"]:
            num = len(outcomes.rows)
            return cls(np.full(num, paper_cost(0.0, sizes["small"], sizes["large"])), np.ones(num), known=False)
        cheap, dear = (np.array(tokens[role], dtype=np.float64) * sizes[role] for role in ROLES)
        return cls(cheap, dear, known=True)

    def labels(self, train: list[int]) -> torch.Tensor | None:
        """What the large model's answers cost more, the mean of some rows being 1: float32 [n, 1].

        Returns:
            None where there is nothing to learn: unknown, or no more.
        """
        extra = np.maximum(self.dear - self.cheap, 0.0)
        mean = float(extra[train].mean())
        if not self.known or mean <= 0.0:
            return None
        return torch.tensor(extra / mean, dtype=torch.float32)[:, None]


def cost_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of logarithms of means and labels [n, 1], a scalar: Poisson's, least where each mean is that of its labels.

    A squared error of logarithms would find the median, and gains are worth what answers cost in the mean.
    """
    return functional.poisson_nll_loss(outputs, labels)
