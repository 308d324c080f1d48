"""Trees drawn or chosen by a draft model: their shapes, their distributions, and the law of what they lead to."""

import heapq
import math
from dataclasses import replace
from itertools import permutations

import pytest
import torch

from decoding.draft_trees import GrowingTree, draw_without_replacement, grow_top_tree, sibling_proposals
from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.drafters.dyspec import DySpecDrafter
from decoding.drafters.model_sequences import ModelSequencesDrafter, ModelSequencesParams
from decoding.drafters.rsd_c import RsdCDrafter, RsdCParams
from decoding.drafters.rsd_s import RsdSDrafter, RsdSParams, perturb
from decoding.drafters.sequoia import SequoiaDrafter
from decoding.fakes import TableModel, markov
from decoding.lengths.fixed import FixedLength
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from decoding.verifiers.rejection import RejectionVerifier, subtract
from tests.decoding.markov_rounds import FAR, p_value
from turnout.part_choice import PartChoice
from turnout.types import SamplingParams

DRAWN = ["rsd_c", "rsd_s", "sequoia", "dyspec", "staged"]
FIXED = ["model_tree", "vocab_trim", "staged"]
EVERY = sorted({*DRAWN, *FIXED, "model_sequences"})
LENGTH = FixedLength()


def drafter_of(name: str, kind: Candidates | None = None, **params: object) -> Drafter:
    choice = PartChoice.of(name, **params)
    part = choice.find("decoding.drafters", "drafter")
    assert issubclass(part, Drafter)
    return part(choice.parse(part, "drafter"), kind)


@pytest.mark.parametrize("drafter", EVERY)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {}, {"temperature": 0.6, "top_p": 0.9}], ids=str)
async def test_match_gives_the_tokens_of_plain_decoding(run, make_model, drafter, sampling):
    small, large = make_model("small", 1), make_model("large", 2, num_parameters=10)
    accepted = 0
    for seed in range(4, 8 if sampling == {"temperature": 0} else 6):
        prompt = (seed, 2)
        plain = await run("plain", small, large, prompt=prompt, seed=seed, **sampling)
        done = await run("speculative", small, large, {"drafter": drafter}, prompt=prompt, seed=seed, **sampling)
        assert done.ids == plain.ids
        accepted += done.seq.meter.speculation.accepted_tokens
    assert accepted > 0


@pytest.mark.parametrize("drafter", EVERY)
async def test_greedy_output_is_plain_greedy_under_rejection(run, make_model, drafter):
    small, large = make_model("small", 1), make_model("large", 2, num_parameters=10)
    params = {"drafter": drafter, "verifier": "spectr" if drafter == "model_sequences" else "rejection"}
    for index in range(2):
        plain = await run("plain", small, large, prompt=(index, 3), temperature=0)
        done = await run("speculative", small, large, params, prompt=(index, 3), temperature=0)
        assert done.ids == plain.ids


@pytest.mark.parametrize("name", [*DRAWN, "model_sequences"])
async def test_drafting_with_the_target_itself_is_accepted_to_the_last_level(run, make_model, name):
    params = {
        "drafter": name,
        "verifier": "spectr" if name == "model_sequences" else "rejection",
        "draft_length": 3,
        "nodes": 40,
    }
    done = await run("speculative", make_model("small", 5), make_model("large", 5), params, max_tokens=16)
    meter = done.seq.meter.speculation
    if name in ("dyspec", "staged", "sequoia"):  # their trees need not reach the same depth everywhere
        assert meter.accepted_tokens >= meter.rounds
    else:
        assert meter.rounds == 4
    assert not any(token.kind == "recovered" for token in done.seq.generated)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    "room", [DraftBudget(1, 1), DraftBudget(1, 9), DraftBudget(4, 2), DraftBudget(3, 7), DraftBudget(6, 40)], ids=str
)
async def test_every_draft_keeps_to_its_room_and_says_what_it_was_drawn_from(make_model, name, room):
    model = make_model("small", 3)
    kind = Candidates.DRAWN if name in DRAWN or name == "vocab_trim" else None
    for seed in range(5):
        seq = Sequence([seed, 2], SamplingParams(top_k=5), seed)
        tree = await drafter_of(name, kind).propose(model, seq, room, LENGTH)
        assert 1 <= len(tree) <= room.nodes
        assert max(tree.depths()) < room.depth
        for parent in range(ROOT, len(tree)):
            siblings = tree.children(parent)
            if not tree.sequences:
                assert len({tree.tokens[node] for node in siblings}) == len(siblings)
            for index, node in enumerate(siblings):
                proposal = tree.proposal(node)
                if proposal is None:
                    assert name in ("model_tree", "sequoia")
                    continue
                assert proposal[tree.tokens[node]] > 0
                assert proposal.sum().item() == pytest.approx(1.0, abs=1e-5)
                earlier = [] if tree.sequences else siblings[:index]
                assert not proposal[[tree.tokens[each] for each in earlier]].any()


@pytest.mark.parametrize("name", [name for name in DRAWN if name != "sequoia"])
async def test_a_greedy_request_is_drafted_as_the_arg_max_chain(make_model, name):
    model, seq = make_model("small", 3), Sequence([1, 2], SamplingParams(temperature=0), 0)
    tree = await drafter_of(name, Candidates.DRAWN).propose(model, seq, DraftBudget(4, 30), LENGTH)
    assert tree.is_chain
    context = list(seq.tokens)
    for token in tree.tokens:
        assert token == int(model.next_logits(context).argmax())
        context.append(token)
    assert len(tree) == 4


@pytest.mark.parametrize("name", [*DRAWN, "model_sequences"])
async def test_nothing_is_drafted_where_a_mask_left_nothing(name):
    model = TableModel("small", lambda tokens: torch.full((4,), float("-inf")), 4)
    tree = await drafter_of(name, None if name == "model_sequences" else Candidates.DRAWN).propose(
        model, Sequence([0], SamplingParams(), 0), DraftBudget(3, 8), LENGTH
    )
    assert len(tree) == 0


@pytest.mark.parametrize("name", [*DRAWN, "model_sequences"])
async def test_each_round_draws_with_noise_of_its_own(make_model, name):
    """The place after one more token was drawn before, in the round that began a token earlier."""
    model = TableModel("small", lambda tokens: torch.zeros(50), 50)
    drafter = drafter_of(name, None if name == "model_sequences" else Candidates.DRAWN)
    same = 0
    for seed in range(20):
        early, late = (Sequence([1] * length, SamplingParams(), seed) for length in (2, 3))
        first = await drafter.propose(model, early, DraftBudget(2, 8), LENGTH)
        second = await drafter.propose(model, late, DraftBudget(2, 8), LENGTH)
        depths = first.depths()
        before = {token for token, depth in zip(first.tokens, depths, strict=True) if depth == 1}
        same += second.tokens[0] in before
    assert same <= 8  # each of at most 7 in 50 by chance; all 20 with the noise used again


LAWS = [
    RsdCDrafter(RsdCParams(branching=(2, 2))),
    RsdSDrafter(RsdSParams(beam=3)),
    SequoiaDrafter(),
    DySpecDrafter(),
]


def name_of(value: object) -> str:
    return type(value).__name__ if isinstance(value, Drafter) else str(value)


@pytest.mark.parametrize("drafter", LAWS, ids=name_of)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "top_p": 0.8}], ids=["raw", "top_p"])
def test_rejection_keeps_the_target_law(drafter, sampling):
    assert p_value(drafter, RejectionVerifier(), 700, **sampling) > 1e-3


@pytest.mark.exactness
@pytest.mark.parametrize("drafter", LAWS, ids=name_of)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "top_p": 0.8}], ids=["raw", "top_p"])
def test_rejection_keeps_the_target_law_over_many_runs(drafter, sampling):
    assert p_value(drafter, RejectionVerifier(), 200_000, **sampling) > 1e-3


class Altered(RsdCDrafter):
    """Constant branching with a fault."""

    async def propose(self, model, seq, room, length):
        return self.alter(await super().propose(model, seq, room, length))

    def alter(self, tree: DraftTree) -> DraftTree:
        raise NotImplementedError


class SortsSiblings(Altered):
    """By draft probability: the draw order is lost, each keeps the distribution of its new place."""

    def alter(self, tree):
        first = tree.proposals[0]
        tokens = sorted(tree.tokens, key=lambda token: -first[token])
        return DraftTree(tuple(tokens), tree.parents, tree.source, tuple(sibling_proposals(first, tokens)))


class DropsADraw(Altered):
    """Leaves out what the draft model finds unlikely, after it was drawn."""

    def alter(self, tree):
        kept = [node for node, token in enumerate(tree.tokens) if tree.proposals[0][token] >= 0.35]
        return DraftTree(
            tuple(tree.tokens[node] for node in kept),
            (ROOT,) * len(kept),
            tree.source,
            tuple(tree.proposals[node] for node in kept),
        )


class LeavesQUnnormalised(Altered):
    """Later siblings without the earlier ones, but not scaled up."""

    def alter(self, tree):
        left = tree.proposals[0].clone()
        left[tree.tokens[0]] = 0.0
        return replace(tree, proposals=(tree.proposals[0], left))


@pytest.mark.parametrize(
    ("fault", "sampling"),
    [
        (SortsSiblings, {}),
        (DropsADraw, {}),
        (LeavesQUnnormalised, {}),
        (SortsSiblings, {"temperature": 0.6, "top_p": 0.95}),
    ],
    ids=str,
)
def test_planted_faults_are_caught(fault, sampling):
    drafter = fault(RsdCParams(branching=(2,)))
    assert p_value(drafter, RejectionVerifier(), 1_200, DraftBudget(1, 2), FAR, **sampling) < 1e-4


def test_acceptance_by_number_of_draws_without_replacement():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    accepted = [0.0, 0.0, 0.0]
    for tokens in permutations(range(3)):
        reached, residual = 1.0, p
        orders = sibling_proposals(q, list(tokens))
        drawn = math.prod(float(each[token]) for each, token in zip(orders, tokens, strict=True))
        for rank, (proposal, token) in enumerate(zip(orders, tokens, strict=True)):
            share = min(1.0, float(residual[token] / proposal[token]))
            accepted[rank] += drawn * reached * share
            reached *= 1.0 - share
            residual = subtract(residual, token, proposal)
    totals = [sum(accepted[: rank + 1]) for rank in range(3)]
    assert totals == pytest.approx([0.70, 0.82, 1.0], abs=1e-6)


def test_draws_without_replacement_have_the_law_of_successive_draws():
    q = torch.tensor([0.6, 0.3, 0.1, 0.0])
    counts: dict[tuple[int, ...], int] = {}
    runs = 2_000
    drawn = [draw_without_replacement([q], 4, seed, 7, [0])[0] for seed in range(runs)]
    for draws in drawn:
        order = tuple(token for token, _ in draws)
        counts[order] = counts.get(order, 0) + 1
    assert sum(counts.values()) == runs
    for order in permutations(range(3)):
        first, second = float(q[order[0]]), float(q[order[1]])
        expected = first * second / (1 - first)
        assert counts[order] / runs == pytest.approx(expected, abs=4 * math.sqrt(expected / runs))


def test_perturbed_values_of_children_have_their_parents_as_maximum():
    generator = torch.Generator().manual_seed(0)
    paths = torch.randn(5, 40, generator=generator).log_softmax(-1) - 3.0
    paths[:, 7] = float("-inf")
    above = torch.tensor([3.0, 0.0, -2.0, -30.0, 60.0])
    noise = -(-torch.rand(5, 40, generator=generator).log()).log()
    values = perturb(paths, above, noise)
    assert values.amax(-1).tolist() == pytest.approx(above.tolist(), abs=1e-5)
    assert (values[:, 7] == float("-inf")).all()
    g = (paths + noise).double()
    plain = -torch.log((-above[:3, None].double()).exp() - (-g[:3].amax(-1, keepdim=True)).exp() + (-g[:3]).exp())
    finite = g[:3].isfinite()
    assert torch.allclose(values[:3].double()[finite], plain[finite], atol=1e-3)


async def test_a_beam_of_one_is_a_chain_drawn_from_the_draft():
    table = torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.3, 0.3], [0.3, 0.1, 0.6]])
    model, counts, runs = TableModel("small", markov(table), 3), torch.zeros(3, 3), 500
    for seed in range(runs):
        tree = await RsdSDrafter(RsdSParams(beam=1)).propose(
            model, Sequence([0], SamplingParams(), seed), DraftBudget(2, 9), LENGTH
        )
        assert tree.is_chain
        counts[tree.tokens[0], tree.tokens[1]] += 1
    expected = table[0][:, None] * table * runs
    assert ((counts - expected) ** 2 / expected).sum() < 26.1  # 0.999 quantile at 8 degrees of freedom


async def test_levels_of_a_beam_and_of_constant_branching(make_model):
    model, seq = make_model("small", 3), Sequence([1, 2], SamplingParams(), 4)
    beam = await RsdSDrafter(RsdSParams(beam=5)).propose(model, seq, DraftBudget(3, 64), LENGTH)
    assert [beam.depths().count(depth) for depth in range(3)] == [5, 5, 5]
    model.forwards = 0
    bush = await RsdCDrafter(RsdCParams(branching=(3, 2, 1))).propose(model, seq, DraftBudget(3, 64), LENGTH)
    assert [bush.depths().count(depth) for depth in range(3)] == [3, 6, 6]
    assert model.forwards == 3


def best_first(model: TableModel, context: list[int], room: DraftBudget) -> dict[tuple[int, ...], float]:
    """Paths in the order of a heap that always takes the most probable one."""
    heap, found = [(0.0, ())], {}
    while heap and len(found) <= room.nodes:
        cost, path = heapq.heappop(heap)
        found[path] = -cost
        if len(path) < room.depth:
            logp = model.next_logits([*context, *path]).log_softmax(-1)
            for token, value in enumerate(logp.tolist()):
                heapq.heappush(heap, (cost - value, (*path, token)))
    del found[()]
    return found


@pytest.mark.parametrize("room", [DraftBudget(1, 5), DraftBudget(3, 10), DraftBudget(8, 32)], ids=str)
async def test_the_top_tree_is_that_of_a_best_first_search(make_model, room):
    for seed in range(5):
        model, seq = make_model("small", seed), Sequence([1, 2], SamplingParams(), 0)
        top = await grow_top_tree(GrowingTree(model, seq, LENGTH), room, 12)
        paths = {tuple(top.tree.tokens[n] for n in top.tree.path(node)): node for node in range(len(top.tree))}
        expected = best_first(model, seq.tokens, room)
        assert paths.keys() == expected.keys()
        for path, node in paths.items():
            assert top.logprobs[node] == pytest.approx(expected[path], abs=1e-4)
        assert list(top.logprobs) == sorted(top.logprobs, reverse=True)
        assert model.forwards <= room.depth
        assert top.root.top


async def test_sequences_share_equal_beginnings_and_are_drawn_apart():
    table = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    model = TableModel("small", markov(table), 2)
    drafter = ModelSequencesDrafter(ModelSequencesParams(sequences=2))
    counts, runs = torch.zeros(2, 2), 400
    for seed in range(runs):
        model.fed_tokens = 0
        tree = await drafter.propose(model, Sequence([0], SamplingParams(), seed), DraftBudget(2, 20), LENGTH)
        one, two = tree.sequences
        assert [tree.parents[node] for node in one] == [ROOT, one[0]]
        assert (one[0] == two[0]) == (tree.tokens[one[0]] == tree.tokens[two[0]])
        assert set(one) | set(two) == set(range(len(tree)))
        assert model.fed_tokens == 1 + len({one[0], two[0]})
        model.cached.clear()
        counts[tree.tokens[one[0]], tree.tokens[two[0]]] += 1
    assert ((counts - runs / 4) ** 2 / (runs / 4)).sum() < 16.3  # 0.999 quantile at 3 degrees of freedom
