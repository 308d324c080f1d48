"""Draft trees: proposed tokens with parents, and for sampled ones the distribution each was drawn from."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

ROOT = -1


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Proposed continuations of a sequence. The root (-1) is the sequence's last token.

    Attributes:
        tokens: [n] token ids; a parent always comes before its children, siblings stand in draw order.
        parents: [n] index of each token's parent, -1 for the root.
        proposals: [n] the processed distribution (float32 [vocab]) each token was really drawn from;
            None for a deterministic candidate (the same as one-hot).
        source: name of the model that drafted.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    source: str
    proposals: tuple[torch.Tensor | None, ...] = field(default=())

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError("tokens and parents differ in length")
        if self.proposals and len(self.proposals) != len(self.tokens):
            raise ValueError("proposals and tokens differ in length")
        for index, parent in enumerate(self.parents):
            if not ROOT <= parent < index:
                raise ValueError(f"node {index} has parent {parent}; a parent comes before its children")

    @classmethod
    def chain(cls, tokens: list[int], source: str, proposals: list[torch.Tensor | None] | None = None) -> DraftTree:
        """A tree with one branch."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)), source, tuple(proposals or ()))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether every node has at most one child."""
        return all(parent == index - 1 for index, parent in enumerate(self.parents))

    def proposal(self, node: int) -> torch.Tensor | None:
        """The distribution `node` was drawn from, None if it was not drawn."""
        return self.proposals[node] if self.proposals else None

    def children(self, node: int) -> list[int]:
        """Children in draw order; `node` may be ROOT."""
        return [index for index, parent in enumerate(self.parents) if parent == node]

    def depth(self, node: int) -> int:
        """0 for ROOT, 1 for its children."""
        steps = 0
        while node != ROOT:
            node, steps = self.parents[node], steps + 1
        return steps

    def depths(self) -> list[int]:
        """[n] depth of every node below the root's children, which are at 0."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return depths

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to `node`."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def ancestor_mask(self) -> torch.Tensor:
        """bool [n, n]: row i may see column j (j is i or an ancestor of i)."""
        mask = torch.eye(len(self.tokens), dtype=torch.bool)
        for index, parent in enumerate(self.parents):
            if parent != ROOT:
                mask[index] |= mask[parent]
        return mask
