"""Draft trees: proposed tokens with parents, for sampled ones the distribution each was drawn from, and extra rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

ROOT = -1


@dataclass(frozen=True, slots=True)
class ExtraRows:
    """Extra rows fed together with a draft: read by its drafter, never judged, never kept.

    Attributes:
        tokens: [m] token ids.
        depths: [m] places after the root: a row at depth d stands where the nodes at `DraftTree.depth` d + 1 stand.
        mask: bool [m, n + m]: which of the draft's n nodes, then of the extra rows, each sees (itself included);
            all see the sequence.
    """

    tokens: tuple[int, ...]
    depths: tuple[int, ...]
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Draft tree: proposed continuations of a sequence. The root (-1) is the sequence's last token.

    Attributes:
        tokens: [n] token ids; a parent always comes before its children, siblings stand in draw order.
        parents: [n] index of each token's parent, -1 for the root.
        proposals: [n] the processed distribution (float32 [vocab]) each token was really drawn from;
            None for a deterministic candidate (the same as one-hot).
        source: name of the model that drafted.
        sequences: where whole sequences were drawn independently of each other, the nodes of each from the root's
            child down, in draw order; nodes that several share stand in the tree once.
        extra: rows to feed along.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    source: str
    proposals: tuple[torch.Tensor | None, ...] = field(default=())
    sequences: tuple[tuple[int, ...], ...] = ()
    extra: ExtraRows | None = None

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
        """Build a tree with one branch."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)), source, tuple(proposals or ()))

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def merged(cls, paths: Iterable[Iterable[int]], most: int, source: str) -> DraftTree:
        """Merge paths of fixed candidates into a trie: equal prefixes are stored once; earlier paths come first.

        Args:
            paths: tokens from the root's child down.
            most: nodes at most.
            source: name of the model that drafted.
        """
        tokens: list[int] = []
        parents: list[int] = []
        known: dict[tuple[int, int], int] = {}
        for path in paths:
            node = ROOT
            for token in path:
                child = known.get((node, token))
                if child is None:
                    if len(tokens) >= most:
                        break
                    child = known[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = child
        return cls(tuple(tokens), tuple(parents), source)

    @classmethod
    def empty(cls, source: str) -> DraftTree:
        """Return an empty draft: the target reads its next token only."""
        return cls((), (), source)

    def within(self, vocab_size: int) -> DraftTree:
        """Return the tree without fixed candidates outside the target's vocabulary, and without their descendants.

        Raises:
            ValueError: one of them was drawn: leaving it out would change what its siblings' distributions mean.
        """
        if all(0 <= token < vocab_size for token in self.tokens):
            return self
        if self.proposals or self.sequences or self.extra is not None:
            raise ValueError("a token outside the target's vocabulary was drawn")
        kept: dict[int, int] = {ROOT: ROOT}
        for index, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if parent in kept and 0 <= token < vocab_size:
                kept[index] = len(kept) - 1
        nodes = [index for index in kept if index != ROOT]
        return DraftTree(
            tuple(self.tokens[index] for index in nodes),
            tuple(kept[self.parents[index]] for index in nodes),
            self.source,
        )

    @property
    def fed_tokens(self) -> tuple[int, ...]:
        """Tokens of the nodes, then those of the extra rows."""
        return self.tokens if self.extra is None else self.tokens + self.extra.tokens

    @property
    def is_chain(self) -> bool:
        """True if every node has at most one child, and there are no extra rows."""
        return self.extra is None and all(parent == index - 1 for index, parent in enumerate(self.parents))

    def proposal(self, node: int) -> torch.Tensor | None:
        """Return the distribution `node` was drawn from, None if it was not drawn."""
        return self.proposals[node] if self.proposals else None

    def children(self, node: int) -> list[int]:
        """Return a node's children in draw order; `node` may be ROOT."""
        return [index for index, parent in enumerate(self.parents) if parent == node]

    def depth(self, node: int) -> int:
        """Return the depth of a node: 0 for ROOT, 1 for its children."""
        steps = 0
        while node != ROOT:
            node, steps = self.parents[node], steps + 1
        return steps

    def depths(self) -> list[int]:
        """Return [n] the depth of every node below the root's children, which are at 0."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return depths

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root's child down to `node`."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def ancestor_mask(self) -> torch.Tensor:
        """Return the tree attention mask, bool [n, n]: row i may see column j (j is i or an ancestor of i)."""
        mask = np.eye(len(self.tokens), dtype=np.bool_)
        for index, parent in enumerate(self.parents):
            if parent != ROOT:
                # A parent stands before its children, so its row is whole.
                mask[index, : parent + 1] = mask[parent, : parent + 1]
        return torch.from_numpy(mask)
