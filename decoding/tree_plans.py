"""Shapes of draft trees decided before drafting, and the dynamic program that finds the best ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from decoding.tree import ROOT

Floats = npt.NDArray[np.float64]

# Additions and comparisons of the largest table: less than a tenth of a second.
MOST_WORK = 1 << 25
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


def table_work(ranks: int, nodes: int, depth: int) -> int:
    """Additions and comparisons that a `PlanTable` takes."""
    return min(ranks, nodes) * depth * nodes**2


class PlanTable:
    """The trees with the most expected tokens, of every size (paper #46, Sequoia: Scalable, Robust, and Hardware-aware
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
        nodes: most nodes.
        depth: deepest node.
    """

    def __init__(self, acceptance: Sequence[float], nodes: int, depth: int) -> None:
        self.nodes, self.depth = nodes, depth
        ranks = min(len(acceptance), nodes)
        self.lengths: Floats = np.full((depth + 1, nodes + 1), -np.inf)
        self.lengths[0, 0] = 1.0
        self._ranks = np.zeros((depth + 1, nodes + 1), dtype=np.int64)
        self._last = np.zeros((depth + 1, ranks + 1, nodes + 1), dtype=np.int64)
        sizes = np.arange(nodes)
        # The nodes - 1 places before the first number of nodes are shares that there cannot be.
        padded: Floats = np.full(2 * nodes - 1, -np.inf)
        # Row n, column s: the last child with its subtree takes s + 1 of n + 1 nodes, the others share n - s.
        shared = np.lib.stride_tricks.sliding_window_view(padded, nodes)[:, ::-1]
        for d in range(1, depth + 1):
            with_ranks: Floats = np.full((ranks + 1, nodes + 1), -np.inf)
            with_ranks[0, 0] = 1.0
            for rank in range(1, ranks + 1):
                below = max(acceptance[rank - 1], TINY) * self.lengths[d - 1, :-1]
                padded[nodes - 1 :] = with_ranks[rank - 1][:nodes]
                totals = shared + below
                best = totals.argmax(1)
                with_ranks[rank, 1:] = totals[sizes, best]
                self._last[d, rank, 1:] = best + 1
            self._ranks[d] = with_ranks.argmax(0)
            self.lengths[d] = with_ranks.max(0)

    @property
    def nbytes(self) -> int:
        """Bytes it holds."""
        return self.lengths.nbytes + self._ranks.nbytes + self._last.nbytes

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

    def best_size(self, draft_s: float, target_s: Sequence[float], depth: int) -> tuple[int, int]:
        """Nodes and depth with the least time per expected token; with unknown times, the most expected tokens.

        Args:
            draft_s: seconds of a draft forward, one a level; 0.0 if unknown.
            target_s: [n + 1] seconds of verifying 0 to n nodes, up to the most there may be; 0.0 if unknown.
            depth: deepest node there may be.
        """
        lengths = self.lengths[1 : depth + 1, 1 : len(target_s)]
        seconds = np.asarray(target_s[1:])
        if draft_s > 0.0 and seconds.min() > 0.0:
            levels = np.arange(1, lengths.shape[0] + 1)
            score = np.maximum(lengths, 0.0) / (levels[:, None] * draft_s + seconds)
        else:
            score = lengths
        level, size = np.unravel_index(score.argmax(), score.shape)
        return int(size) + 1, int(level) + 1
