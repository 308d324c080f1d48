import random

import pytest
import torch

from decoding.tree import ROOT, DraftTree

#      a(0)   b(1)
#     /   \     \
#   c(2)  d(3)   e(4)
TREE = DraftTree((10, 11, 12, 13, 14), (-1, -1, 0, 0, 1), "s")


def test_shape_questions():
    assert TREE.children(ROOT) == [0, 1]
    assert TREE.children(0) == [2, 3]
    assert TREE.path(4) == [1, 4]
    assert TREE.path(ROOT) == []
    assert [TREE.depth(node) for node in (ROOT, 1, 3)] == [0, 1, 2]
    assert not TREE.is_chain
    assert TREE.proposal(2) is None


def test_ancestor_mask_is_the_paths():
    mask = TREE.ancestor_mask()
    for node in range(len(TREE)):
        assert mask[node].nonzero()[:, 0].tolist() == TREE.path(node)


def test_the_mask_of_a_large_tree_is_made_of_its_paths():
    generator = random.Random(0)
    parents = tuple(generator.randrange(-1, node) for node in range(120))
    tree = DraftTree(tuple(range(120)), parents, "m")
    mask = tree.ancestor_mask()
    assert mask.dtype == torch.bool
    for node in range(120):
        assert mask[node].nonzero().flatten().tolist() == sorted(tree.path(node))


def test_chain():
    chain = DraftTree.chain([5, 6], "s", [torch.ones(1), None])
    assert chain.parents == (-1, 0)
    assert chain.is_chain
    assert chain.proposal(0) is not None
    assert len(DraftTree.chain([], "s")) == 0


@pytest.mark.parametrize(
    ("tokens", "parents", "proposals", "message"),
    [
        ((1, 2), (-1,), (), "differ in length"),
        ((1, 2), (-1, 0), (None,), "differ in length"),
        ((1, 2), (-1, 1), (), "node 1 has parent 1"),
        ((1, 2), (-2, 0), (), "node 0 has parent -2"),
    ],
)
def test_nonsense_is_refused(tokens, parents, proposals, message):
    with pytest.raises(ValueError, match=message):
        DraftTree(tokens, parents, "s", proposals)
