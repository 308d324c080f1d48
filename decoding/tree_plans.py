"""Shapes of draft trees decided before drafting, and the dynamic program that finds the best ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from decoding.tree import ROOT

Floats = npt.NDArray[np.float64]

TINY = 1e-12  # keeps -inf times a probability defined


@dataclass(frozen=True)
class TreePlan:
    """A shape: nodes level by level, siblings in draw order, without tokens.

    Attributes:
        parents: [n] index of each node's parent, ROOT for the root.
    """

    parents: tuple[int, ...]

    @cached_property
    def depth(self) -> int:
        """Deepest node; the root's children are at 1."""
        depths = {ROOT: 0}
        for node, parent in enumerate(self.parents):
            depths[node] = depths[parent] + 1
        return max(depths.values())

    def children(self) -> dict[int, list[int]]:
        """Children of the root and of every node, in draw order."""
        children: dict[int, list[int]] = {node: [] for node in range(ROOT, len(self.parents))}
        for node, parent in enumerate(self.parents):
            children[parent].append(node)
        return children


def branching_plan(branching: Iterable[int], most: int) -> TreePlan:
    """As many children for every node of a level.

    Args:
        branching: children of the root, of each node at depth 1, and so on.
        most: nodes at most; the last level may be cut.
    """
    parents: list[int] = []
    level = [ROOT]
    for count in branching:
        first = len(parents)
        parents += [parent for parent in level for _ in range(count)][: most - first]
        level = list(range(first, len(parents)))
    return TreePlan(tuple(parents))


class PlanTable:
    """The trees with the most expected tokens, of every size (seed 46, Sequoia: Scalable, Robust, and Hardware-aware
    Speculative Decoding).

    A tree's expected tokens are the sum over its nodes, the root included, of the product of `acceptance` along the
    path to each. Entry [d, n] is over trees of exactly n nodes at most d deep, neither counting the root;
    -inf where there is none.

    Args:
        acceptance: for each rank among siblings, the probability that the verifier takes this one.
        nodes: most nodes.
        depth: deepest node.

    Attributes:
        lengths: float64 [depth + 1, nodes + 1], expected tokens.
    """

    def __init__(self, acceptance: Sequence[float], nodes: int, depth: int) -> None:
        ranks = min(len(acceptance), nodes)
        self.lengths: Floats = np.full((depth + 1, nodes + 1), -np.inf)
        self.lengths[0, 0] = 1.0
        self._ranks = np.zeros((depth + 1, nodes + 1), dtype=np.int64)
        self._last = np.zeros((depth + 1, ranks + 1, nodes + 1), dtype=np.int64)
        # Row n, column s: the last child with its subtree takes s + 1 of n + 1 nodes, the others share n - s.
        sizes = np.arange(nodes)
        shared = sizes[:, None] - sizes[None, :]
        possible = shared >= 0
        for d in range(1, depth + 1):
            with_ranks: Floats = np.full((ranks + 1, nodes + 1), -np.inf)
            with_ranks[0, 0] = 1.0
            for rank in range(1, ranks + 1):
                below = max(acceptance[rank - 1], TINY) * self.lengths[d - 1, :-1]
                totals = np.where(possible, with_ranks[rank - 1][shared] + below, -np.inf)
                best = totals.argmax(1)
                with_ranks[rank, 1:] = totals[sizes, best]
                self._last[d, rank, 1:] = best + 1
            self._ranks[d] = with_ranks.argmax(0)
            self.lengths[d] = with_ranks.max(0)

    def plan(self, nodes: int, depth: int) -> TreePlan:
        """The best tree of that many nodes (a size for which there is one), at most so deep."""
        parents: list[int] = []
        level = [(ROOT, nodes, depth)]
        while level:
            below = []
            for parent, size, left in level:
                for subtree in self._subtrees(size, left):
                    parents.append(parent)
                    below.append((len(parents) - 1, subtree - 1, left - 1))
            level = below
        return TreePlan(tuple(parents))

    def _subtrees(self, size: int, depth: int) -> list[int]:
        """Nodes in the subtree of each child of a root with `size` nodes below it, by rank."""
        subtrees = []
        for rank in range(int(self._ranks[depth, size]), 0, -1):
            subtrees.append(int(self._last[depth, rank, size]))
            size -= subtrees[-1]
        return subtrees[::-1]

    def best_size(self, draft_s: float, target_s: Sequence[float]) -> tuple[int, int]:
        """Nodes and depth with the least time per expected token; with unknown times, the most expected tokens.

        Args:
            draft_s: seconds of a draft forward, one a level; 0.0 if unknown.
            target_s: [nodes + 1] seconds of verifying so many nodes; 0.0 if unknown.
        """
        lengths = self.lengths[1:, 1:]
        seconds = np.asarray(target_s[1 : lengths.shape[1] + 1])
        if draft_s > 0.0 and len(seconds) == lengths.shape[1] and seconds.min() > 0.0:
            levels = np.arange(1, lengths.shape[0] + 1)
            score = np.maximum(lengths, 0.0) / (levels[:, None] * draft_s + seconds)
        else:
            score = lengths
        depth, nodes = np.unravel_index(score.argmax(), score.shape)
        return int(nodes) + 1, int(depth) + 1
