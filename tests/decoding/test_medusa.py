"""Independent heads: their places, the tree grown from their accuracies, and the law of what they lead to."""

import itertools
import math
from typing import Any

import pytest
import torch

from decoding.drafters.base import DraftBudget
from decoding.drafters.medusa import MedusaDrafter, MedusaParams, grow_rank_tree
from decoding.heads import MedusaHeads
from decoding.length_heads import Head
from decoding.lengths.fixed import FixedLength
from decoding.model import NoiseKind, ReadSpec
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from decoding.verifiers.base import VerifyResult
from decoding.verifiers.match import MatchVerifier
from tests.decoding.head_models import LawModel, StateModel, answer, pool_of, save_head, shifting_heads
from tests.engine.harness import engine_model
from training.random_models import llama_config, random_model
from turnout.cost import SpeculationMeter
from turnout.errors import Code, TurnoutError
from turnout.types import SamplingParams

AFTER = [3, 4, 0, 5, 2, 6, 1]  # one cycle through all seven tokens: 0 3 5 6 1 4 2
CHAIN = {"drafter": {"name": "medusa", "chain": True}}


def certain(heads, ranks=3):
    return [[0.9, *[0.05] * (ranks - 1)]] * heads


async def test_head_k_drafts_the_token_k_plus_1_places_after_the_pending_one(tmp_path):
    model = StateModel("large", AFTER)
    save_head(tmp_path, "medusa", shifting_heads(AFTER, 3), model.digest, accuracies=certain(3))
    seq = await answer(pool_of(model, tmp_path), "speculative", CHAIN, [0], temperature=0, max_tokens=9)
    assert [token.id for token in seq.generated] == [3, 5, 6, 1, 4, 2, 0, 3, 5]
    meter = seq.meter.speculation
    # The first round reads the prompt; then three drafts and the model's own token, twice.
    assert (meter.rounds, meter.draft_tokens, meter.accepted_tokens) == (3, 6, 6)


@pytest.mark.parametrize("first", [0, 2])
async def test_heads_that_are_one_place_off_are_never_right(tmp_path, first):
    model = StateModel("large", AFTER)
    save_head(tmp_path, "medusa", shifting_heads(AFTER, 3, first), model.digest, accuracies=certain(3))
    seq = await answer(pool_of(model, tmp_path), "speculative", CHAIN, [0], temperature=0, max_tokens=9)
    assert [token.id for token in seq.generated] == [3, 5, 6, 1, 4, 2, 0, 3, 5]
    assert seq.meter.speculation.accepted_tokens == 0


async def test_the_state_is_the_one_at_the_accepted_node_whoever_drafted(tmp_path):
    model = StateModel("large", AFTER)
    save_head(tmp_path, "medusa", shifting_heads(AFTER, 2), model.digest, accuracies=certain(2))
    drafter = MedusaDrafter(MedusaParams(chain=True))
    drafter.check(pool_of(model, tmp_path))
    seq = Sequence([0], SamplingParams(max_tokens=20), 0)
    assert len(await model.propose(seq, drafter, DraftBudget(2, 2), FixedLength())) == 0
    # Root -> 3 (right) -> {2 (wrong), 5 (right)}: the accepted node is the third of the tree.
    other = DraftTree((3, 2, 5), (ROOT, 0, 0), "someone")
    verdict = await model.verify(seq, other, MatchVerifier(), drafter.want | ReadSpec(draw=NoiseKind.SAMPLE))
    assert verdict.path == (0, 2)
    seq.extend(verdict.tokens, {"large": 1, "someone": 1})
    model.observe(seq, drafter, other, verdict)
    tree = await model.propose(seq, drafter, DraftBudget(2, 2), FixedLength())
    assert (seq.tokens, tree.tokens) == ([0, 3, 5, 6], (1, 4))


async def test_a_state_of_another_place_drafts_nothing(tmp_path):
    model = StateModel("large", AFTER)
    save_head(tmp_path, "medusa", shifting_heads(AFTER, 2), model.digest, accuracies=certain(2))
    drafter = MedusaDrafter()
    drafter.check(pool_of(model, tmp_path))
    seq = Sequence([0], SamplingParams(max_tokens=20), 0)
    [row] = await model.extend(seq, want=drafter.want)
    drafter.observe(model, seq, DraftTree.empty("m"), VerifyResult((), (), [row]))
    assert len(await model.propose(seq, drafter, DraftBudget(2, 2), FixedLength())) > 0
    seq.extend((await model.decode(Sequence([0], SamplingParams(max_tokens=1), 0))).tokens, {"large": 1})
    assert len(await model.propose(seq, drafter, DraftBudget(2, 2), FixedLength())) == 0


def brute_force(accuracies, nodes):
    """The most expected accepted nodes of any tree of so many nodes, by trying every set of rank paths."""
    paths = [
        path
        for depth in range(1, len(accuracies) + 1)
        for path in itertools.product(*(range(len(each)) for each in accuracies[:depth]))
    ]

    def chance(path):
        return math.prod(accuracies[head][rank] for head, rank in enumerate(path))

    best = 0.0
    for chosen in itertools.combinations(paths, nodes):
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
            best = max(best, sum(map(chance, chosen)))
    return best


@pytest.mark.parametrize("seed", range(6))
def test_the_greedy_tree_is_the_best_of_all_trees(seed):
    generator = torch.Generator().manual_seed(seed)
    accuracies = tuple(tuple(each.tolist()) for each in torch.rand(3, 2, generator=generator).double() / 1.5)
    for nodes in range(1, 6):
        tree = grow_rank_tree(accuracies, nodes)
        assert len(tree.parents) == nodes
        assert tree.accepted == pytest.approx(brute_force(accuracies, nodes))


def test_a_tree_of_known_shape():
    # Chances: 0 .6, 00 .36, 000 .216, 1 .3, 01 .18, 10 .18: nodes in the order of these.
    tree = grow_rank_tree(((0.6, 0.3), (0.6, 0.3), (0.6, 0.3)), 4)
    assert tree.parents == (-1, 0, -1, 1)
    assert tree.guesses == ((0, 0), (1, 0), (0, 1), (2, 0))
    assert tree.accepted == pytest.approx(0.6 + 0.36 + 0.3 + 0.216)
    draft = tree.fill([[5, 6], [7, 8], [9, 4]], "m")
    assert draft.tokens == (5, 7, 6, 9)
    assert draft.ancestor_mask().tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [False, False, True, False],
        [True, True, False, True],
    ]


def test_a_sparse_tree_beats_the_full_tree_of_the_same_size():
    accuracies = ((0.6, 0.2, 0.1),) * 3
    full = 0.8 + 0.8**2 + 0.8**3  # two guesses at every node: 2 + 4 + 8 nodes
    assert grow_rank_tree(accuracies, 14).accepted > full


def test_every_head_has_blocks_of_its_own_and_begins_as_the_model():
    heads = MedusaHeads(8, heads=3, blocks=2)
    assert len({each.data_ptr() for each in heads.parameters()}) == len(list(heads.parameters())) == 3 * 2 * 2
    states = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(heads(states), states[:, None].expand(5, 3, 8))


@pytest.fixture(scope="module")
def engine():
    return engine_model(random_model(llama_config(vocab_size=64, eos_token_id=1, pad_token_id=0), 3, 0.2))


def random_heads(width, vocab_size=0):
    torch.manual_seed(5)
    heads = MedusaHeads(width, 4, vocab_size=vocab_size)
    for each in heads.parameters():
        torch.nn.init.normal_(each, std=0.3)
    return heads


@pytest.mark.parametrize("vocab_size", [0, 64])
@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {}, {"temperature": 0.7, "top_p": 0.9}], ids=str)
async def test_random_heads_leave_the_answer_as_it_is(engine, tmp_path, chain, sampling, vocab_size):
    save_head(tmp_path, "medusa", random_heads(64, vocab_size), engine.digest, accuracies=certain(4, 10))
    models = pool_of(engine, tmp_path)
    drafter = {"drafter": {"name": "medusa", "chain": chain}, "length": "fixed"}
    for seed in range(3):
        plain = await answer(models, "plain", {"model": "large"}, [seed, 9, 7], seed, **sampling)
        drafted = await answer(models, "speculative", drafter, [seed, 9, 7], seed, **sampling)
        assert drafted.tokens == plain.tokens
        most = 4 if chain else 63
        assert drafted.meter.speculation.draft_tokens > 0.5 * most * (drafted.meter.speculation.rounds - 2)


async def test_the_engine_reads_heads_through_the_models_own_matrix(engine, tmp_path):
    """Heads that are still the identity draft what the model found most probable in place of the pending token."""
    save_head(tmp_path, "medusa", MedusaHeads(64, 2), engine.digest, accuracies=certain(2))
    drafter = MedusaDrafter()
    drafter.check(pool_of(engine, tmp_path))
    seq = Sequence([5, 6, 7], SamplingParams(max_tokens=20), 0)
    [row] = await engine.extend(seq, want=drafter.want | ReadSpec(draw=None, top=3))
    drafter.observe(engine, seq, DraftTree.empty("m"), VerifyResult((), (), [row]))
    tree = await engine.propose(seq, drafter, DraftBudget(1, 3), FixedLength())
    assert list(tree.tokens) == [token for token, _ in row.top]
    engine.release(seq)


async def test_matrices_of_the_heads_own_are_read_in_place_of_the_models(engine, tmp_path):
    """With twelve rows more than the model has tokens, for which nothing is drafted however probable they are."""
    heads = MedusaHeads(64, 2, vocab_size=64 + 12)
    with torch.no_grad():
        for output in heads.outputs:
            torch.nn.init.normal_(output.weight, generator=torch.Generator().manual_seed(1))
            output.weight[64:] *= 100.0
    save_head(tmp_path, "medusa", heads, engine.digest, accuracies=[[0.5, 0.3, 0.2]] * 2)
    drafter = MedusaDrafter()
    drafter.check(pool_of(engine, tmp_path))
    seq = Sequence([5, 6, 7], SamplingParams(max_tokens=20), 0)
    [row] = await engine.extend(seq, want=drafter.want)
    drafter.observe(engine, seq, DraftTree.empty("m"), VerifyResult((), (), [row]))
    tree = await engine.propose(seq, drafter, DraftBudget(1, 3), FixedLength())
    logits = heads.outputs[0].weight.detach().half().float() @ row.hidden[-1].float()
    assert list(tree.tokens) == logits[:64].topk(3).indices.tolist()
    engine.release(seq)


def test_an_artifact_of_another_model_or_kind_is_refused(tmp_path):
    model = StateModel("large", AFTER)
    heads: Head = shifting_heads(AFTER, 2)
    save_head(tmp_path, "medusa", heads, "another digest", accuracies=certain(2))
    with pytest.raises(TurnoutError) as refused:
        MedusaDrafter().check(pool_of(model, tmp_path))
    assert refused.value.code is Code.INVALID_ARGUMENT
    assert refused.value.field == "method.params.drafter.artifact"
    assert "another digest" in refused.value.message
    assert model.digest in refused.value.message
    save_head(tmp_path, "redrafter", heads, model.digest)
    with pytest.raises(TurnoutError, match="'medusa' is needed"):
        MedusaDrafter(MedusaParams(artifact="redrafter")).check(pool_of(model, tmp_path))
    with pytest.raises(TurnoutError, match="available: medusa, redrafter"):
        MedusaDrafter(MedusaParams(artifact="none")).check(pool_of(model, tmp_path))


def test_a_head_is_read_once_and_again_when_its_file_changes(tmp_path):
    model = StateModel("large", AFTER)
    models = pool_of(model, tmp_path)
    made = []
    for heads in (2, 2, 3):
        if len(made) != 1:
            save_head(tmp_path, "medusa", shifting_heads(AFTER, heads), model.digest, accuracies=certain(heads))
        drafter = MedusaDrafter()
        drafter.check(models)
        made.append(drafter.head)
    assert made[0] is made[1]
    assert len(made[2].heads) == 3
    assert made[2].heads[0][0].linear.weight.dtype is torch.float32


# Every token is drawn from this, whatever stands before: heads are right or wrong independently of each other.
DRAWN = torch.tensor([0.5, 0.3, 0.15, 0.05])
GUESSES = [[0, 1, 2, 3], [1, 0, 2, 3], [2, 0, 1, 3]]  # of each head, best first: the next one's best is the worse one
ACCURACIES = [[float(DRAWN[token]) for token in guesses] for guesses in GUESSES]


def guessing_heads() -> MedusaHeads:
    """Heads that guess so at the one state there is."""
    size = len(DRAWN)
    state = DRAWN.log() / 8.0
    heads = MedusaHeads(size, len(GUESSES), vocab_size=size)
    assert heads.outputs is not None
    for output, guesses in zip(heads.outputs, GUESSES, strict=True):
        logits = torch.empty(size)
        logits[guesses] = torch.arange(float(size), 0.0, -1.0)
        output.weight.data = torch.outer(logits, state) / (state @ state)
    return heads.requires_grad_(False)


async def drawn_answers(folder, accuracies: list[list[float]], **params: Any) -> SpeculationMeter:
    """What drafting brought over some answers that `DRAWN` is the law of."""
    model = LawModel("large", DRAWN.expand(len(DRAWN), -1))
    save_head(folder, "medusa", guessing_heads(), model.digest, accuracies=accuracies)
    meter = SpeculationMeter()
    for seed in range(10):
        done = await answer(pool_of(model, folder), "speculative", params, [0], seed, max_tokens=150)
        meter.merge(done.meter.speculation)
    return meter


async def test_a_chain_is_accepted_head_by_head_as_its_accuracies_say(tmp_path):
    """Within four deviations; a head is judged where those before it were right."""
    meter = await drawn_answers(tmp_path, ACCURACIES, **CHAIN)
    judged = [meter.drafted_at[0], *meter.accepted_at]
    shares = [accepted / of for accepted, of in zip(meter.accepted_at, judged, strict=False)]
    assert shares == sorted(shares, reverse=True)
    for (accuracy, *_), share, of in zip(ACCURACIES, shares, judged, strict=False):
        assert abs(share - accuracy) < 4 * math.sqrt(accuracy * (1 - accuracy) / of)


async def test_the_sparse_tree_is_accepted_as_promised_and_beats_the_full_one_of_its_size(tmp_path):
    """Heads that are told to be equally sure of two guesses each make the full tree: 2 + 4 + 8 nodes."""
    params = {"drafter": "medusa", "nodes": 14}
    equal = [[0.5, 0.5]] * 3
    assert grow_rank_tree(tuple(map(tuple, equal)), 14).accepted == pytest.approx(3.0)
    sparse = grow_rank_tree(tuple(map(tuple, ACCURACIES)), 14)
    full = 0.8 + 0.8 * 0.8 + 0.8 * 0.8 * 0.65
    found = []
    for accuracies, promised in ((ACCURACIES, sparse.accepted), (equal, full)):
        meter = await drawn_answers(tmp_path, accuracies, **params)
        assert meter.draft_tokens > 13 * meter.rounds
        found.append(meter.accepted_tokens / meter.rounds)
        # Whole rounds are from none to three accepted tokens; some are cut by an answer's end.
        assert found[-1] == pytest.approx(promised, abs=4 * 1.5 / math.sqrt(meter.rounds))
    assert found[0] > found[1] + 0.1
