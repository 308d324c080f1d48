"""How Medusa heads learn (seed 191, Medusa-1: the model stays frozen)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from decoding.heads import MedusaHeads
from training.heads import Batch, Frozen, WindowRecipe, WindowTask


@dataclass(frozen=True)
class MedusaRecipe(WindowRecipe):
    """The heads' shape; `decay` is how much less each next head weighs in the loss. A `training.heads.Recipe`."""

    kind: ClassVar[str] = "medusa"
    heads: int = 4
    blocks: int = 1
    decay: float = 0.8

    def task(self, frozen: Frozen, width: int) -> MedusaTask:
        """See `training.heads.Recipe.task`."""
        return MedusaTask(self, frozen, width)


class MedusaTask(WindowTask):
    """Every head predicts its own token from the state alone.

    Args:
        recipe: the shape.
        frozen: the model; its output matrix is used as it is.
        width: of its hidden states.
    """

    def __init__(self, recipe: MedusaRecipe, frozen: Frozen, width: int) -> None:
        self.head = self._heads = MedusaHeads(width, recipe.heads, recipe.blocks)
        self.weights = tuple(recipe.decay**index for index in range(recipe.heads))
        self.soft = recipe.soft
        self._frozen = frozen

    def predict(self, batch: Batch) -> torch.Tensor:
        """See `WindowTask.predict`."""
        return self._frozen.logits(self._heads(batch.states))
