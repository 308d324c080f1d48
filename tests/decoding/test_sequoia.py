"""The dynamic program against the card's numbers and brute force; rates, times and shapes while serving."""

import threading
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from scipy import stats

from decoding.draft_trees import Beyond, GrowingTree, grow_planned
from decoding.drafters.base import DraftBudget
from decoding.drafters.sequoia import REPLAN_AFTER, AcceptanceRates, SequoiaDrafter, SequoiaParams
from decoding.fakes import TableModel, pair
from decoding.lengths.fixed import FixedLength
from decoding.model import Readout
from decoding.sequence import Sequence
from decoding.tree import ROOT
from decoding.tree_plans import PlanTable, TreePlan, branching_plan
from decoding.verifiers.rejection import RejectionVerifier
from tests.decoding.many_runs import many_runs
from tests.decoding.markov_rounds import TARGET, Readings, play
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
        nodes, depth = table.best_size(draft_s, target_s, 6)
        costs = {
            (n, d): (d * draft_s + target_s[n]) / table.lengths[d, n]
            for n in range(1, 13)
            for d in range(1, 7)
            if table.lengths[d, n] > 0
        }
        assert costs[nodes, depth] == pytest.approx(min(costs.values()))
    assert table.best_size(0.1, [1.0] * 13, 6)[0] == 12
    assert table.best_size(5.0, [1.0] * 13, 6)[1] == 1
    assert table.best_size(0.0, [1.0] * 13, 6) == table.best_size(0.1, [0.0] * 13, 6)
    nodes, depth = table.best_size(0.0, [0.0] * 13, 6)
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
    tree = await drafter.propose(model, seq, DraftBudget(4, 12), FixedLength())
    rows = [Readout(probs=target)] * (len(tree) + 1)
    verdict = RejectionVerifier().judge(seq, tree, rows, "large")
    drafter.observe(model, seq, tree, verdict)


async def test_the_shape_follows_the_rates_of_tenant_and_law():
    """Targets that always agree want a chain; the next request of the tenant starts with it, another's does not."""
    q = torch.tensor([0.4, 0.3, 0.2, 0.1])
    model = TableModel("small", lambda tokens: q.log(), 4)
    drafter = SequoiaDrafter(SequoiaParams(ranks=4, memory=200))
    first = await drafter.propose(model, Sequence([0], SamplingParams(), 0), DraftBudget(4, 12), FixedLength())
    assert len(first.children(ROOT)) > 1
    for seed in range(4 * REPLAN_AFTER):
        await served(drafter, model, Sequence([0], SamplingParams(), seed), q)
    depths = {}
    for tenant, sampling in (("default", {}), ("other", {}), ("default", {"temperature": 0})):
        later = SequoiaDrafter(SequoiaParams(ranks=4, memory=200))
        seq = Sequence([0], SamplingParams(**sampling), 0, tenant=tenant)
        await later.propose(model, seq, DraftBudget(12, 12), FixedLength())
        depths[tenant, bool(sampling)] = later._plan.depth
    assert depths["default", False] == 12
    assert depths["other", False] < 12
    assert depths["default", True] < 12


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """Nodes and depth of every table that is made, and whether the event loop's own thread made it."""
    made: list[tuple[int, int, bool]] = []
    loop = threading.get_ident()

    def make(rates: list[float], nodes: int, depth: int) -> PlanTable:
        made.append((nodes, depth, threading.get_ident() == loop))
        return PlanTable(rates, nodes, depth)

    monkeypatch.setattr("decoding.drafters.sequoia.PlanTable", make)
    return made


async def test_a_large_table_is_made_beside_the_event_loop(make_model, built) -> None:
    for nodes, at_once in ((64, True), (256, False)):
        seq = Sequence([0, 1], SamplingParams(), 0, tenant=str(nodes))
        await SequoiaDrafter().propose(make_model("small", 1), seq, DraftBudget(10, nodes), FixedLength())
        assert built[-1] == (nodes, 10, at_once)
    assert len(built) == 2


async def test_one_table_serves_the_last_rounds_every_crowd_and_the_next_request(make_model, built) -> None:
    model = make_model("small", 1)
    for seed in range(2):
        drafter, seq = SequoiaDrafter(), Sequence([0, 1], SamplingParams(), seed)
        for depth in range(10, 0, -1):
            for sequences in (1, 16):
                tree = await drafter.propose(model, seq, DraftBudget(depth, 32, sequences), FixedLength())
                assert max(tree.depths()) <= depth - 1
    assert built == [(32, 10, True)]


async def test_a_smaller_room_has_the_plan_of_a_table_of_its_own(make_model) -> None:
    model, drafter = make_model("small", 1), SequoiaDrafter()
    for room in (DraftBudget(10, 64), DraftBudget(4, 40), DraftBudget(10, 7), DraftBudget(1, 3)):
        seq = Sequence([0, 1], SamplingParams(), 0)
        shared = await drafter.propose(model, seq, room, FixedLength())
        alone = await SequoiaDrafter().propose(make_model("small", 1), seq, room, FixedLength())
        assert (shared.parents, shared.tokens) == (alone.parents, alone.tokens)


async def test_rates_that_are_old_are_planned_for_anew(make_model, built) -> None:
    model, drafter, seq = make_model("small", 1), SequoiaDrafter(), Sequence([0, 1], SamplingParams(), 0)
    await drafter.propose(model, seq, DraftBudget(4, 12), FixedLength())
    rates = drafter._rates(model, seq)
    for _ in range(REPLAN_AFTER - 1):
        rates.add(2, 0)
    await drafter.propose(model, seq, DraftBudget(4, 12), FixedLength())
    assert len(built) == 1
    rates.add(2, 0)
    await drafter.propose(model, seq, DraftBudget(2, 12), FixedLength())
    assert built == [(12, 4, True)] * 2
    assert rates.nbytes > 0


async def test_rounds_of_other_drafters_teach_nothing(make_model):
    model, seq = make_model("small", 1), Sequence([1, 2], SamplingParams(), 0)
    drafter, other = SequoiaDrafter(), SequoiaDrafter()
    tree = await other.propose(model, seq, DraftBudget(3, 6), FixedLength())
    rows = [Readout(probs=torch.full((12,), 1 / 12))] * (len(tree) + 1)
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
        trees[name] = await drafter.propose(
            small, Sequence([0], SamplingParams(), 0), DraftBudget(8, 32), FixedLength()
        )
    assert len(trees["cheap"]) == 32
    assert max(trees["dear draft"].depths()) == 0
    assert len(trees["dear nodes"]) <= 3


async def test_trees_are_smaller_the_more_sequences_are_verified_together():
    """Seed 46's hardware-aware size: nodes are free while weights are read for one sequence, and dear among many."""
    q = torch.full((8,), 1 / 8)
    costs = {"small": 0.05, "large": 1.0}
    small, large = (
        Timed(name, lambda tokens: q.log(), 8, seconds=lambda fed, s=s: s * max(1.0, fed / 64))
        for name, s in costs.items()
    )
    drafter = SequoiaDrafter()
    drafter.check(pair(small, large))
    sizes = []
    for sequences in (1, 4, 16, 17, 64, 900):
        tree = await drafter.propose(
            small, Sequence([0], SamplingParams(), 0), DraftBudget(8, 64, sequences), FixedLength()
        )
        sizes.append(len(tree))
    assert sizes[0] > sizes[1] > sizes[2] > sizes[3] == sizes[4] == sizes[5] == 1
    assert sizes[0] > 16


# Three children of the root, two of the first one.
WIDE = TreePlan((-1, -1, -1, 0, 0))


@pytest.mark.parametrize("beyond", ["nothing", "likely", "uniform"])
async def test_where_a_greedy_request_leaves_one_token_the_others_follow(make_model, beyond: Beyond) -> None:
    model = make_model("small", 3)
    seq = Sequence([1, 2], SamplingParams(temperature=0), 0)
    tree = await grow_planned(GrowingTree(model, seq, FixedLength()), WIDE, beyond)
    best = model.next_logits([1, 2]).argsort(descending=True).tolist()
    below = model.next_logits([1, 2, best[0]]).argsort(descending=True).tolist()
    if beyond == "nothing":
        assert tree.tokens == (best[0], below[0])
        return
    assert tree.parents == WIDE.parents
    assert len(set(tree.tokens[:3])) == 3
    assert (tree.tokens[0], tree.tokens[3]) == (best[0], below[0])
    later = tree.proposals[1:3]
    if beyond == "likely":
        assert tree.tokens == (*best[:3], *below[:2])
        assert later == (None, None)
    else:
        for proposal, earlier in zip(later, (tree.tokens[:1], tree.tokens[:2]), strict=True):
            expected = torch.ones(12)
            expected[list(earlier)] = 0.0
            assert proposal is not None
            assert torch.allclose(proposal, expected / expected.sum())


async def test_beyond_its_distribution_tokens_are_drawn_alike() -> None:
    """A nucleus of one token of six; the second child is any of the others: chi-square over 1,500 drafts."""
    model = TableModel("small", lambda _: torch.tensor([9.0, 1.0, 0.0, 2.0, 1.0, 3.0]), 6)
    counts = [0] * 6
    for seed in range(1_500):
        seq = Sequence([0], SamplingParams(top_p=0.5), seed)
        tree = await grow_planned(GrowingTree(model, seq, FixedLength()), TreePlan((-1, -1)), "uniform")
        assert tree.tokens[0] == 0
        counts[tree.tokens[1]] += 1
    assert counts[0] == 0
    assert stats.chisquare(counts[1:]).pvalue > 1e-3


@pytest.mark.parametrize("beyond", ["likely", "uniform"])
def test_the_law_is_the_targets_where_distributions_are_exhausted(beyond: Beyond) -> None:
    assert exhausted_p_value(beyond, 1_000) > 1e-3


@pytest.mark.exactness
@pytest.mark.parametrize("beyond", ["likely", "uniform"])
def test_the_law_is_the_targets_where_distributions_are_exhausted_over_many_runs(beyond: Beyond) -> None:
    assert exhausted_p_value(beyond, 200_000) > 1e-3


@many_runs()
def exhausted_p_value(beyond: Beyond, runs: int) -> float:
    """Draft distributions of one and two tokens of three, under a target of all three."""
    model = Readings(torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.6, 0.0, 0.4]]))
    for row in model.rows:
        row.top = tuple((token, max(logprob, -9.0)) for token, logprob in row.top)
    target = [Readout(probs=probs) for probs in TARGET]
    drafter = SequoiaDrafter(SequoiaParams(beyond=beyond))
    counts = torch.zeros(3, 3, 3)
    for seed in range(runs):
        counts[tuple(play(drafter, RejectionVerifier(), model, target, seed, DraftBudget(2, 8)))] += 1  # type: ignore[arg-type]
    law = TARGET[0][:, None, None] * TARGET[:, :, None] * TARGET[None]
    return float(stats.chisquare(counts.flatten(), (law / law.sum() * runs).flatten()).pvalue)


async def test_at_temperature_zero_the_tree_beats_the_chain(run: Any, make_model: Any) -> None:
    large, twist = make_model("large", 2), make_model("twist", 1)
    small = TableModel("small", lambda t: large.next_logits(t) + 1.2 * twist.next_logits(t), 12)
    means = {}
    for drafter in ("sequoia", "dyspec"):  # a drafter of draws has one draw at temperature 0: a chain
        params = {"drafter": drafter, "verifier": "rejection", "nodes": 12, "draft_length": 4}
        made = [
            await run("speculative", small, large, params, prompt=(seed, 2), temperature=0, max_tokens=60)
            for seed in range(8)
        ]
        means[drafter] = sum(done.seq.meter.speculation.tokens_per_round for done in made) / 8
    assert means["sequoia"] > 1.2 * means["dyspec"]
