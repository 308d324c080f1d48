"""Blocks: what the rows of trees, partial forwards and continuations are, and when a cache of them can be used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decoding.block import Block
from decoding.drafters.lookahead import window_rows
from decoding.partial_forward import LayerSelection, Sketch
from decoding.tree import ROOT, DraftTree

TREE = DraftTree((10, 11, 12, 13), (ROOT, ROOT, 0, 2), "s")


def test_a_chain_sees_what_stands_before() -> None:
    block = Block.chain((5, 6, 7))
    assert block.is_chain
    assert block.seen().tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert [block.path(row) for row in (ROOT, 0, 2)] == [(), (5,), (5, 6, 7)]


def test_rows_of_a_tree_see_their_paths() -> None:
    block = Block.of_tree(TREE, 2)
    assert (block.positions, block.resume, block.is_chain) == ((0, 0, 1, 2), 2, False)
    assert [block.path(row) for row in range(-1, 4)] == [(), (10,), (11,), (10, 12), (10, 12, 13)]


def test_extra_rows_come_last_and_no_node_sees_them() -> None:
    extra = window_rows([[1], [2, 3]], len(TREE))
    block = Block.of_tree(DraftTree(TREE.tokens, TREE.parents, "s", extra=extra))
    assert block.tokens == (10, 11, 12, 13, 1, 2, 3)
    assert block.positions == (0, 0, 1, 2, *extra.depths)
    assert torch.equal(block.seen(4), TREE.ancestor_mask())
    assert not block.seen()[:4, 4:].any()
    assert torch.equal(block.seen()[4:], extra.mask)


def test_a_partial_forward_keeps_its_layers_and_states() -> None:
    states = torch.zeros(2, 4)
    sketch = Sketch(3, (5, 6), (ROOT, ROOT), 0, LayerSelection(first=1, last=2), states)
    block = Block.of_sketch(sketch)
    assert (block.base, block.layers, block.positions) == (3, LayerSelection(first=1, last=2), (0, 0))
    assert block.states is states


FULL = Block((1, 2, 3), (2, 0, 1), torch.ones(3, 3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("other", "rows", "alike"),
    [
        (Block.of_tree(TREE), 4, True),
        (Block.of_tree(DraftTree((10, 11, 12, 9), (ROOT, ROOT, 0, 2), "t")), 3, True),
        (Block.of_tree(DraftTree((10, 11, 12, 9), (ROOT, ROOT, 0, 2), "t")), 4, False),
        (Block.of_tree(DraftTree((10, 11, 12), (ROOT, ROOT, 1), "s")), 3, False),
        (Block((10, 11, 12), (0, 0, 1), TREE.ancestor_mask()[:3, :3], LayerSelection(last=2)), 3, False),
        (Block((10, 11, 12), (0, 1, 1), TREE.ancestor_mask()[:3, :3]), 3, False),
        (Block.chain((10,)), 1, True),
        (Block.chain((10, 11)), 2, False),
    ],
)
def test_blocks_begin_alike(other: Block, rows: int, alike: bool) -> None:
    held = Block.of_tree(TREE)
    assert held.begins_like(other, rows) is alike
    assert not Block.of_tree(TREE, 1).begins_like(other, 5)


def test_a_mask_may_be_any_and_rows_may_stand_anywhere() -> None:
    assert not FULL.is_chain
    assert FULL.begins_like(FULL, 3)
    assert not FULL.begins_like(Block((1, 2, 3), (2, 0, 1)), 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"positions": (0,)}, "2 positions"),
        ({"mask": torch.ones(2, 3, dtype=torch.bool)}, "mask of 2 x 2"),
        ({"resume": 3}, "from 0 to 2"),
        ({"layers": LayerSelection(first=1)}, "states go into"),
        ({"states": torch.zeros(2, 4)}, "states go into"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Block(**({"tokens": (1, 2), "positions": (0, 1)} | fields))
