"""How a recurrent draft head learns (paper #115, ReDrafter)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from decoding.heads import RecurrentHead
from training.heads import Batch, Frozen, WindowRecipe, WindowTask


@dataclass(frozen=True)
class ReDrafterRecipe(WindowRecipe):
    """The head's blocks, and how many tokens ahead it learns to go. A `training.heads.Recipe`."""

    kind: ClassVar[str] = "redrafter"
    blocks: int = 1
    ahead: int = 5

    def task(self, frozen: Frozen, width: int) -> ReDrafterTask:
        """See `training.heads.Recipe.task`."""
        return ReDrafterTask(self, frozen, width)


class ReDrafterTask(WindowTask):
    """The cell runs over the true tokens, the state of the window held fixed.

    What the head says of the state alone begins as what the model says of it: its matrix starts from the model's.

    Args:
        recipe: the shape.
        frozen: the model; its embedding is used as it is.
        width: of its hidden states.
    """

    def __init__(self, recipe: ReDrafterRecipe, frozen: Frozen, width: int) -> None:
        matrix = next(frozen.output.parameters())
        self.head = self._head = RecurrentHead(width, len(matrix), recipe.blocks)
        with torch.no_grad():
            self._head.output.weight[:, :width] = matrix
        self.weights = (1.0,) * recipe.ahead
        self.soft = recipe.soft
        self._frozen = frozen

    def predict(self, batch: Batch) -> torch.Tensor:
        """See `WindowTask.predict`."""
        ahead = batch.known.shape[1]
        embeddings = self._frozen.embed(batch.tokens[:, :ahead])
        states = self._head.start(len(batch.states))
        after = []
        for index in range(ahead):
            states = self._head.advance(states, embeddings[:, index])
            after.append(states)
        return self._head.logits(batch.states[:, None].expand(-1, ahead, -1), torch.stack(after, 1))
