"""Blocks: hypothetical rows after a sequence, which are not, or not yet, part of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from decoding.partial_forward import WHOLE, LayerSelection, Sketch
from decoding.tree import ROOT, DraftTree


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Block of hypothetical rows of a forward: a continuation, a draft tree, tokens that run through some layers only.

    Their keys lie in the slots after those of the tokens before the block, row i's in slot i, wherever it stands.

    Attributes:
        tokens: [n] token ids.
        positions: [n] places after the tokens before the block, the first of which is 0. Several rows may stand in one
            place.
        mask: bool [n, n]: row i sees row j; every row sees all tokens before the block. None: each row sees itself and
            the rows before it.
        layers: the layers that the rows run through.
        states: [n, hidden] input of layer `layers.first`, with `resume` 0; None where that is layer 0.
        resume: the first row to run; those before it are as in the block before this one, whose KV is used.
        base: tokens of the sequence before the block; None: all that it has when the block is run.

    Raises:
        ValueError: the fields contradict each other.
    """

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    mask: torch.Tensor | None = None
    layers: LayerSelection = WHOLE
    states: torch.Tensor | None = None
    resume: int = 0
    base: int | None = None

    def __post_init__(self) -> None:
        rows = len(self.tokens)
        if len(self.positions) != rows or (self.mask is not None and self.mask.shape != (rows, rows)):
            raise ValueError(f"a block of {rows} rows has {rows} positions, and a mask of {rows} x {rows}")
        if not 0 <= self.resume <= rows or (self.states is not None) != (self.layers.first > 0):
            raise ValueError(f"resume is from 0 to {rows}; states go into a layer other than the first")

    @classmethod
    def chain(cls, tokens: tuple[int, ...], layers: LayerSelection = WHOLE) -> Block:
        """Build a block of tokens one after the other."""
        return cls(tokens, tuple(range(len(tokens))), layers=layers)

    @classmethod
    def of_tree(cls, tree: DraftTree, resume: int = 0) -> Block:
        """Build a block of a draft tree's nodes, then its extra rows, which no node sees."""
        if tree.is_chain:
            return cls(tree.tokens, tuple(range(len(tree))), resume=resume)
        mask, depths, extra = tree.ancestor_mask(), tree.depths(), tree.extra
        if extra is None:
            return cls(tree.tokens, tuple(depths), mask, resume=resume)
        unseen = torch.zeros(len(tree), len(extra.tokens), dtype=torch.bool)
        mask = torch.cat([torch.cat([mask, unseen], 1), extra.mask])
        return cls(tree.fed_tokens, (*depths, *extra.depths), mask, resume=resume)

    @classmethod
    def of_sketch(cls, sketch: Sketch) -> Block:
        """Build a block of the tokens of a partial forward."""
        rows = cls.of_tree(DraftTree(sketch.tokens, sketch.parents, ""), sketch.start)
        return replace(rows, layers=sketch.depth, states=sketch.states, base=sketch.base)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """True if positions and masks are those of consecutive tokens of a sequence."""
        return self.mask is None and self.positions == tuple(range(len(self)))

    def seen(self, rows: int | None = None) -> torch.Tensor:
        """Return the mask of the first `rows` rows among themselves, bool [rows, rows]; None: of all rows."""
        count = len(self) if rows is None else rows
        if self.mask is None:
            return torch.ones(count, count, dtype=torch.bool).tril()
        return self.mask[:count, :count]

    def path(self, row: int) -> tuple[int, ...]:
        """Return the tokens that a row sees, its own included; ROOT: none."""
        if self.mask is None or row == ROOT:
            return self.tokens[: row + 1]
        return tuple(self.tokens[each] for each in self.mask[row].numpy().nonzero()[0])

    def begins_like(self, other: Block, rows: int) -> bool:
        """Return whether the first `rows` rows have the same tokens, places, masks and layers in both blocks."""
        return (
            self.layers == other.layers
            and len(self) >= rows
            and self.tokens[:rows] == other.tokens[:rows]
            and self.positions[:rows] == other.positions[:rows]
            and ((self.mask is None and other.mask is None) or torch.equal(self.seen(rows), other.seen(rows)))
        )
