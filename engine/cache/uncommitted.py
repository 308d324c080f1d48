"""KV of rows that are not part of a sequence, behind that of its tokens."""

from __future__ import annotations

import torch

from decoding.block import Block
from decoding.partial_forward import LayerSelection


class ScratchKV:
    """KV of a block's rows, in the slots after those of a table's tokens, until anything else is done there."""

    __slots__ = ("_block", "_keeps_trees", "_states")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Note that the slots are given back or written to."""
        self._block: Block | None = None
        self._states: torch.Tensor | None = None
        self._keeps_trees = False

    def hold(self, block: Block, first: int, states: torch.Tensor | None, keeps_trees: bool) -> None:
        """Note that the rows of a block are there.

        Args:
            block: which.
            first: its first row that was run now.
            states: [n - first, hidden] what came out of its layers, where a later forward may continue from there.
            keeps_trees: whether rows that are no chain can see those of an earlier forward.
        """
        if first and states is not None and self._states is not None:
            states = torch.cat([self._states[:first], states])
        self._block, self._states, self._keeps_trees = block, states, keeps_trees

    def holds(self, block: Block) -> bool:
        """Whether the rows before `block.resume` are there, run through the same layers, and seen by the others."""
        if not block.resume:
            return True
        seen = self._keeps_trees or block.is_chain
        return seen and self._block is not None and self._block.begins_like(block, block.resume)

    def states_of(self, tokens: tuple[int, ...]) -> tuple[LayerSelection, torch.Tensor] | None:
        """The layers that still have to run for a chain of n tokens, and the states [n, hidden] that go into them.

        None: the chain is not there, or it was not run through exactly the first layers.
        """
        held, states = self._block, self._states
        if held is None or states is None or not held.begins_like(Block.chain(tokens, held.layers), len(tokens)):
            return None
        return LayerSelection(first=held.layers.last or 0), states[: len(tokens)]
