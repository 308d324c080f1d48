"""What lies in a cache behind a sequence's tokens: nodes of a growing draft tree, or of a sketch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decoding.partial_forward import Depth, Sketch
from decoding.tree import DraftTree

Nodes = tuple[tuple[int, int], ...]  # (token, parent) of each


@dataclass(frozen=True, slots=True)
class Sketched:
    """Through which layers tokens were run, and what came out: [n, hidden]."""

    depth: Depth
    states: torch.Tensor


class Tail:
    """Hypothetical tokens whose KV is in the slots after those of a table's tokens, until anything else is done."""

    __slots__ = ("_nodes", "_sketched")

    def __init__(self) -> None:
        self._nodes: Nodes = ()
        self._sketched: Sketched | None = None

    def forget(self) -> None:
        """The slots are given back or written to."""
        self._nodes = ()
        self._sketched = None

    def grown(self, tree: DraftTree) -> None:
        """All nodes of a tree are there."""
        self._nodes = tuple(zip(tree.tokens, tree.parents, strict=True))
        self._sketched = None

    def holds(self, tree: DraftTree, count: int) -> bool:
        """Whether the first so many nodes of a growing tree are there."""
        before = tuple(zip(tree.tokens[:count], tree.parents[:count], strict=True))
        return not before or (self._sketched is None and self._nodes[:count] == before)

    def sketched(self, sketch: Sketch, first: int, states: torch.Tensor) -> None:
        """Tokens of a sketch from so many on were run, and these states came out, [n, hidden]."""
        if first and self._sketched is not None:
            states = torch.cat([self._sketched.states[:first], states])
        self._nodes = tuple(zip(sketch.tokens, sketch.parents, strict=True))
        self._sketched = Sketched(sketch.depth, states)

    def holds_sketch(self, sketch: Sketch) -> bool:
        """Whether the tokens before a sketch's start are there, run through the same layers."""
        held = self._sketched
        before = tuple(zip(sketch.tokens, sketch.parents, strict=True))[: sketch.start]
        return not before or (held is not None and held.depth == sketch.depth and self._nodes[: len(before)] == before)

    def resumable(self, tokens: tuple[int, ...]) -> Sketched | None:
        """The states of these tokens in a row, if all of them were run through the first layers and no others."""
        held = self._sketched
        chain = tuple((token, index - 1) for index, token in enumerate(tokens))
        if held is None or held.depth != Depth(last=held.depth.last) or self._nodes[: len(chain)] != chain:
            return None
        return Sketched(held.depth, held.states[: len(chain)])
