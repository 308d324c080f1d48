"""How a recurrent draft head learns (seed 115, ReDrafter)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from decoding.heads import RecurrentHead
from training.heads import Batch, Frozen


@dataclass(frozen=True)
class ReDrafterRecipe:
    """The head's blocks, and how many tokens ahead it learns to go. A `training.heads.Recipe`."""

    kind: ClassVar[str] = "redrafter"
    blocks: int = 1
    ahead: int = 5

    def task(self, frozen: Frozen, width: int) -> ReDrafterTask:
        """See `training.heads.Recipe.task`."""
        return ReDrafterTask(self, frozen, width)


class ReDrafterTask:
    """The cell runs over the true tokens, the state of the window held fixed. Implements `training.heads.Task`.

    What the head says of the state alone begins as what the model says of it: its matrix starts from the model's.

    Args:
        recipe: the shape.
        frozen: the model; its embedding is used as it is.
        width: of its hidden states.
    """

    def __init__(self, recipe: ReDrafterRecipe, frozen: Frozen, width: int) -> None:
        matrix = next(frozen.output.parameters())
        self.head = RecurrentHead(width, len(matrix), recipe.blocks)
        with torch.no_grad():
            self.head.output.weight[:, :width] = matrix
        self.weights = (1.0,) * recipe.ahead
        self._frozen = frozen

    def predict(self, batch: Batch) -> torch.Tensor:
        """See `training.heads.Task.predict`."""
        ahead = batch.known.shape[1]
        embeddings = self._frozen.embed(batch.tokens[:, :ahead])
        states = self.head.start(len(batch.states))
        after = []
        for index in range(ahead):
            states = self.head.advance(states, embeddings[:, index])
            after.append(states)
        return self.head.logits(batch.states[:, None].expand(-1, ahead, -1), torch.stack(after, 1))
