"""The dynamic program against the card's numbers and brute force; rates, times and shapes while serving."""

from itertools import pairwise, product

import pytest
import torch

from decoding.drafters.base import Room
from decoding.drafters.sequoia import REPLAN_AFTER, AcceptanceRates, SequoiaDrafter, SequoiaParams
from decoding.fakes import TableModel, pair
from decoding.lengths.fixed import FixedLength
from decoding.model import Row
from decoding.sequence import Sequence
from decoding.tree import ROOT
from decoding.tree_plans import PlanTable, TreePlan, branching_plan
from decoding.verifiers.rejection import RejectionVerifier
from turnout.types import SamplingParams

RATES = (0.6, 0.2, 0.1)


def expected_tokens(plan: TreePlan, rates: tuple[float, ...]) -> float:
    chances = {ROOT: 1.0}
    for children in plan.children().items():
        for rank, child in enumerate(children[1]):
            chances[child] = chances[children[0]] * rates[rank]
    return sum(chances.values())


def test_best_lengths_of_the_card():
    free = PlanTable(RATES, 6, 6)
    assert free.lengths[6].tolist() == pytest.approx([1, 1.6, 1.96, 2.176, 2.376, 2.5056, 2.6256])
    shallow = PlanTable(RATES, 6, 2)
    assert shallow.lengths[2].tolist() == pytest.approx([1, 1.6, 1.96, 2.16, 2.28, 2.4, 2.5])


@pytest.mark.parametrize("rates", [RATES, (0.3, 0.3, 0.3), (0.9, 0.0, 0.05)], ids=str)
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_plans_have_the_length_promised_and_none_is_better(rates, depth):
    table = PlanTable(rates, 5, depth)
    for nodes in range(1, 6):
        shapes = [TreePlan(parents) for parents in product(*(range(ROOT, node) for node in range(nodes)))]
        fitting = [
            shape for shape in shapes if shape.depth <= depth and max(map(len, shape.children().values())) <= len(rates)
        ]
        if not fitting:
            assert table.lengths[depth, nodes] == -float("inf")
            continue
        plan = table.plan(nodes, depth)
        assert len(plan.parents) == nodes
        assert plan.depth <= depth
        best = max(expected_tokens(shape, rates) for shape in fitting)
        assert expected_tokens(plan, rates) == pytest.approx(best)
        assert table.lengths[depth, nodes] == pytest.approx(best)


def test_size_and_depth_have_the_least_time_per_token():
    table = PlanTable(RATES, 12, 6)
    for draft_s, per_node in ((0.1, 0.0), (1.0, 0.0), (0.1, 0.5), (0.001, 0.01)):
        target_s = [1.0 + per_node * nodes for nodes in range(13)]
        nodes, depth = table.best_size(draft_s, target_s)
        costs = {
            (n, d): (d * draft_s + target_s[n]) / table.lengths[d, n]
            for n in range(1, 13)
            for d in range(1, 7)
            if table.lengths[d, n] > 0
        }
        assert costs[nodes, depth] == pytest.approx(min(costs.values()))
    assert table.best_size(0.1, [1.0] * 13)[0] == 12
    assert table.best_size(5.0, [1.0] * 13)[1] == 1
    assert table.best_size(0.0, [1.0] * 13) == table.best_size(0.1, [0.0] * 13)
    nodes, depth = table.best_size(0.0, [0.0] * 13)
    assert table.lengths[depth, nodes] == table.lengths[1:, 1:].max()


def test_expected_tokens_grow_with_every_node():
    lengths = PlanTable(RATES, 64, 10).lengths[10, 1:]
    assert all(later > earlier for earlier, later in pairwise(lengths.tolist()))


def test_branching_is_cut_to_its_room():
    assert branching_plan((2, 2), 64).parents == (ROOT, ROOT, 0, 0, 1, 1)
    assert branching_plan((2, 2), 3).parents == (ROOT, ROOT, 0)
    assert branching_plan((2, 2), 1).parents == (ROOT,)
    assert branching_plan((2, 1, 1), 64).depth == 3


def test_rates_become_what_was_measured():
    rates = AcceptanceRates(3, 2000)
    for _ in range(1500):
        for outcome in (0, 0, 0, 0, 0, 1, 1, None, None, None):
            rates.add(2, outcome)
    assert rates.rates[:2] == pytest.approx([0.5, 0.2], abs=0.01)
    assert rates.rates[2] == pytest.approx(0.6 / 16)  # never drawn: as assumed
    assert rates.judged == 15_000


def test_rates_never_promise_more_than_one_token():
    rates = AcceptanceRates(3, 1000)
    for _ in range(500):
        rates.add(1, 0)
    assert sum(rates.rates) <= 1.0


async def served(drafter: SequoiaDrafter, model: TableModel, seq: Sequence, target: torch.Tensor) -> None:
    tree = await drafter.propose(model, seq, Room(4, 12), FixedLength())
    rows = [Row(probs=target)] * (len(tree) + 1)
    verdict = RejectionVerifier().judge(seq, tree, rows, "large")
    drafter.observe(model, seq, tree, verdict)


async def test_the_shape_follows_the_rates_of_tenant_and_law():
    """Targets that always agree want a chain; the next request of the tenant starts with it, another's does not."""
    q = torch.tensor([0.4, 0.3, 0.2, 0.1])
    model = TableModel("small", lambda tokens: q.log(), 4)
    drafter = SequoiaDrafter(SequoiaParams(ranks=4, memory=200))
    first = await drafter.propose(model, Sequence([0], SamplingParams(), 0), Room(4, 12), FixedLength())
    assert len(first.children(ROOT)) > 1
    for seed in range(4 * REPLAN_AFTER):
        await served(drafter, model, Sequence([0], SamplingParams(), seed), q)
    depths = {}
    for tenant, sampling in (("default", {}), ("other", {}), ("default", {"temperature": 0})):
        later = SequoiaDrafter(SequoiaParams(ranks=4, memory=200))
        seq = Sequence([0], SamplingParams(**sampling), 0, tenant=tenant)
        await later.propose(model, seq, Room(12, 12), FixedLength())
        depths[tenant, bool(sampling)] = later._plan.depth
    assert depths["default", False] == 12
    assert depths["other", False] < 12
    assert depths["default", True] < 12


async def test_rounds_of_other_drafters_teach_nothing(make_model):
    model, seq = make_model("small", 1), Sequence([1, 2], SamplingParams(), 0)
    drafter, other = SequoiaDrafter(), SequoiaDrafter()
    tree = await other.propose(model, seq, Room(3, 6), FixedLength())
    rows = [Row(probs=torch.full((12,), 1 / 12))] * (len(tree) + 1)
    drafter.observe(model, seq, tree, RejectionVerifier().judge(seq, tree, rows, "large"))
    assert drafter._rates(model, seq).judged == 0


class Timed(TableModel):
    """A model that says what its forwards cost."""

    def __init__(self, *args, seconds):
        super().__init__(*args)
        self.seconds = seconds

    def forward_seconds(self, fed, attended, sequences):
        return self.seconds(fed)


async def test_measured_times_decide_depth_and_size():
    q = torch.full((8,), 1 / 8)
    trees = {}
    for name, draft_s, node_s in (("cheap", 0.001, 0.0), ("dear draft", 10.0, 0.0), ("dear nodes", 0.001, 1.0)):
        small = Timed("small", lambda tokens: q.log(), 8, seconds=lambda fed, s=draft_s: s)
        large = Timed("large", lambda tokens: q.log(), 8, seconds=lambda fed, s=node_s: 1.0 + s * fed)
        drafter = SequoiaDrafter()
        drafter.check(pair(small, large))
        trees[name] = await drafter.propose(small, Sequence([0], SamplingParams(), 0), Room(8, 32), FixedLength())
    assert len(trees["cheap"]) == 32
    assert max(trees["dear draft"].depths()) == 0
    assert len(trees["dear nodes"]) <= 3
