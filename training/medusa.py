"""How Medusa heads learn (paper #191, Medusa-1: the model stays frozen)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from decoding.heads import MedusaHeads
from training.heads import Batch, Frozen, WindowRecipe, WindowTask


@dataclass(frozen=True)
class MedusaRecipe(WindowRecipe):
    """The heads' shape; a `training.heads.Recipe`.

    Attributes:
        heads: places ahead.
        blocks: residual blocks of each.
        decay: how much less each next head weighs in the loss.
        own_matrices: whether each trains an output matrix of its own, which begins as the model's.
    """

    kind: ClassVar[str] = "medusa"
    heads: int = 4
    blocks: int = 1
    decay: float = 0.8
    own_matrices: bool = False

    def task(self, frozen: Frozen, width: int) -> MedusaTask:
        """See `training.heads.Recipe.task`."""
        return MedusaTask(self, frozen, width)


class MedusaTask(WindowTask):
    """Every head predicts its own token from the state alone.

    Args:
        recipe: the shape.
        frozen: the model; its output matrix is used, or copied, as it is.
        width: of its hidden states.
    """

    def __init__(self, recipe: MedusaRecipe, frozen: Frozen, width: int) -> None:
        matrix = next(frozen.output.parameters())
        own = len(matrix) if recipe.own_matrices else 0
        self.head = self._heads = MedusaHeads(width, recipe.heads, recipe.blocks, own)
        for output in self._heads.outputs or ():
            output.load_state_dict({"weight": matrix})
        self.weights = tuple(recipe.decay**index for index in range(recipe.heads))
        self.soft = recipe.soft
        self._frozen = frozen

    def predict(self, batch: Batch) -> torch.Tensor:
        """See `WindowTask.predict`."""
        if self._heads.outputs is not None:
            return self._frozen.capped(self._heads.logits(batch.states))
        return self._frozen.logits(self._heads(batch.states))
