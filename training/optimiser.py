"""Muon for the hidden matrices and AdamW for embeddings and norms, stepped as one."""

from typing import Any

import torch
from torch import nn

from training.recipe import Recipe


class PairedOptimiser:
    """Two optimisers over disjoint parameters that share one learning-rate factor."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            is_hidden_matrix = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
            (matrices if is_hidden_matrix else others).append(parameter)
        self._parameters = matrices + others
        self._peaks = (recipe.muon_lr, recipe.adamw_lr)
        self._optimisers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr=recipe.muon_lr, weight_decay=recipe.weight_decay, momentum=0.95),
            torch.optim.AdamW(others, lr=recipe.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
        )

    def step(self, lr_scale: float) -> float:
        """Clip, apply and clear the gradients; returns the gradient norm before clipping."""
        norm = nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimiser, peak in zip(self._optimisers, self._peaks, strict=True):
            for group in optimiser.param_groups:
                group["lr"] = peak * lr_scale
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        return float(norm)

    def state_dict(self) -> list[dict[str, Any]]:
        """State of both optimisers, matrices first."""
        return [optimiser.state_dict() for optimiser in self._optimisers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Restore what `state_dict` returned."""
        for optimiser, state in zip(self._optimisers, states, strict=True):
            optimiser.load_state_dict(state)
