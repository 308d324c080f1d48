"""DySpec's values against the card, and its levels against the heap they stand for."""

import heapq

import pytest
import torch

from decoding import draft_trees
from decoding.drafters.base import DraftBudget
from decoding.drafters.dyspec import DySpecDrafter, DySpecParams, value_draws
from decoding.fakes import TableModel
from decoding.lengths.fixed import FixedLength
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from turnout.types import SamplingParams

LENGTH = FixedLength()


@pytest.fixture
def no_noise(monkeypatch):
    """Every draw hits the mode of what is left, so that a draw depends on its node alone."""
    monkeypatch.setattr(
        draft_trees, "tree_noise", lambda seed, position, lanes, like: torch.zeros(len(lanes), like.shape[-1])
    )


def heap_of_draws(model: TableModel, context: list[int], room: DraftBudget) -> dict[tuple[int, ...], float]:
    """The card's heap with draws of the mode: path of each draw, and the value it was popped with, in order."""
    q = model.next_logits(context).softmax(-1).double()
    heap: list[tuple[float, int, tuple[int, ...], torch.Tensor]] = [(-1.0, 0, (), q)]
    popped: dict[tuple[int, ...], float] = {}
    count = 0
    while heap and len(popped) < room.nodes:
        value, _, node, left = heapq.heappop(heap)
        token = int(left.argmax())
        share = float(left[token])
        path = (*node, token)
        popped[path] = -value
        rest = left.clone()
        rest[token] = 0.0
        count += 2
        if share < 1.0 - 1e-9:
            heapq.heappush(heap, (value * (1.0 - share), count, node, rest / rest.sum()))
        if len(path) < room.depth:
            below = model.next_logits([*context, *path]).softmax(-1).double()
            heapq.heappush(heap, (value * share, count + 1, path, below))
    return popped


def paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[each] for each in tree.path(node)) for node in range(len(tree))}


def test_the_values_of_the_card():
    model = TableModel("small", lambda tokens: torch.tensor([0.6, 0.3, 0.1]).log(), 3)
    popped = heap_of_draws(model, [0], DraftBudget(9, 7))
    assert list(popped.values()) == pytest.approx([1, 0.6, 0.4, 0.36, 0.3, 0.24, 0.216])
    values = value_draws(1.0, [(0, 0.6), (1, 0.3), (2, 0.1)])
    assert [value.reached for value in values] == pytest.approx([1.0, 0.4, 0.1])
    assert [value.accepted for value in values] == pytest.approx([0.6, 0.3, 0.1])
    assert value_draws(0.0, [(0, 1.0)]) == []
    assert [value.reached for value in value_draws(1.0, [(0, 1.0), (1, 0.0)])] == [1.0]


@pytest.mark.parametrize(
    "room", [DraftBudget(9, 7), DraftBudget(3, 20), DraftBudget(12, 40), DraftBudget(1, 5)], ids=str
)
async def test_levels_draw_what_the_heap_would(no_noise, make_model, room):
    for seed in range(6):
        model, seq = make_model("small", seed), Sequence([1, 2], SamplingParams(), 0)
        tree = await DySpecDrafter(DySpecParams(threshold=0.0)).propose(model, seq, room, LENGTH)
        assert paths_of(tree) == heap_of_draws(model, seq.tokens, room).keys()
        assert model.forwards <= room.depth


async def test_draws_below_the_threshold_are_not_made(no_noise, make_model):
    model, seq, room = make_model("small", 2), Sequence([1, 2], SamplingParams(), 0), DraftBudget(12, 60)
    tree = await DySpecDrafter(DySpecParams(threshold=0.1)).propose(model, seq, room, LENGTH)
    expected = {path for path, value in heap_of_draws(model, seq.tokens, room).items() if value >= 0.1}
    assert paths_of(tree) == expected


async def test_expected_acceptance_is_what_is_accepted_from_the_same_law(run, make_model):
    """With the target as draft, the first draw at each node is taken: rounds are as deep as the first branch."""
    small, large = make_model("small", 4, scale=0.5), make_model("large", 4, scale=0.5)
    params = {"drafter": "dyspec", "verifier": "rejection", "nodes": 16}
    done = await run("speculative", small, large, params, max_tokens=40)
    assert done.seq.meter.speculation.accepted_tokens > done.seq.meter.speculation.rounds
    assert {token.kind for token in done.seq.generated} <= {"accepted", "bonus"}


async def test_siblings_stand_in_draw_order_under_the_distribution_that_is_left(make_model):
    model = make_model("small", 3)
    for seed in range(20):
        seq = Sequence([1, 2], SamplingParams(), seed)
        tree = await DySpecDrafter().propose(model, seq, DraftBudget(4, 30), LENGTH)
        siblings = tree.children(ROOT)
        left = model.next_logits([1, 2]).softmax(-1)
        for node in siblings:
            assert torch.allclose(tree.proposal(node), left, atol=1e-5)
            left = left.clone()
            left[tree.tokens[node]] = 0.0
            left /= left.sum()
