"""Beams of the recurrent head: the recurrence, the search, the merged tree, and the law of what it leads to."""

import itertools
import math

import pytest
import torch

from decoding.drafters.base import DraftBudget
from decoding.drafters.redrafter import KEPT, ReDrafterDrafter, ReDrafterParams, search_beams
from decoding.heads import RecurrentHead
from decoding.lengths.fixed import FixedLength
from decoding.model import NoiseKind, ReadSpec
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from decoding.verifiers.base import VerifyResult
from decoding.verifiers.match import MatchVerifier
from tests.decoding.head_models import LawModel, StateModel, answer, following_head, knowing_head, pool_of, save_head
from tests.engine.harness import engine_model
from training.random_models import llama_config, random_model
from turnout.types import SamplingParams, TokenKind

AFTER = [3, 4, 0, 5, 2, 6, 1]  # one cycle through all seven tokens: 0 3 5 6 1 4 2


def random_head(width, vocab_size, seed=0, std=0.5):
    torch.manual_seed(seed)
    head = RecurrentHead(width, vocab_size)
    for each in head.parameters():
        torch.nn.init.normal_(each, std=std)
    return head.requires_grad_(False)


def recurrence(head, hidden, embedding, tokens):
    """Log-probabilities after each of `tokens`, from the pending one on: the paper's formulas, spelled out."""
    state = torch.zeros_like(hidden)
    rows = []
    for token in tokens:
        pre = head.token.weight @ embedding[token] + head.token.bias + head.recurrence.weight @ state
        state = pre * torch.sigmoid(pre)
        both = torch.cat([hidden, state])
        for block in head.blocks:
            inner = block.linear.weight @ both + block.linear.bias
            both = both + inner * torch.sigmoid(inner)
        rows.append((head.output.weight @ both).log_softmax(-1))
    return rows


@pytest.mark.parametrize("seed", range(3))
def test_one_beam_is_the_greedy_recurrence(seed):
    width, vocab = 16, 20
    head = random_head(width, vocab, seed)
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(vocab, width, generator=generator)
    hidden = torch.randn(width, generator=generator) / 10  # so that the recurrence decides
    greedy = [4]
    for _ in range(5):
        greedy.append(int(recurrence(head, hidden, embedding, greedy)[-1].argmax()))
    [beam] = search_beams(head, lambda tokens: embedding[tokens], hidden, 4, width=1, length=5)
    assert beam == greedy[1:]
    assert len(set(beam)) > 1


def test_enough_beams_find_the_best_continuations_of_all():
    width, vocab, length = 6, 4, 3
    head = random_head(width, vocab, 3)
    generator = torch.Generator().manual_seed(3)
    embedding, hidden = torch.randn(vocab, width, generator=generator), torch.randn(width, generator=generator)

    def score(path):
        rows = recurrence(head, hidden, embedding, [1, *path[:-1]])
        return sum(float(row[token]) for row, token in zip(rows, path, strict=True))

    every = sorted(itertools.product(range(vocab), repeat=length), key=score, reverse=True)
    beams = search_beams(head, lambda tokens: embedding[tokens], hidden, 1, width=vocab**2, length=length)
    assert [tuple(beam) for beam in beams] == every[: vocab**2]


def test_the_first_step_grows_from_one_beam_and_only_the_most_probable_tokens_count():
    head = random_head(6, 200, 1)
    embedding, hidden = torch.eye(200)[:, :6].contiguous(), torch.ones(6)
    beams = search_beams(head, lambda tokens: embedding[tokens], hidden, 0, width=64, length=1)
    assert len(beams) == KEPT
    assert len({beam[0] for beam in beams}) == KEPT


def test_merging_beams_is_undone_by_walking_the_tree():
    beams = [[91, 92, 93], [91, 92, 94], [90, 92, 93]]
    tree = DraftTree.merged(beams, 50, "m")
    assert tree.tokens[:4] == (91, 92, 93, 94)
    assert tree.parents[:4] == (ROOT, 0, 1, 1)
    assert len(tree) == 7
    leaves = [node for node in range(len(tree)) if not tree.children(node)]
    assert [[tree.tokens[node] for node in tree.path(leaf)] for leaf in leaves] == beams


@pytest.fixture(scope="module")
def engine():
    return engine_model(random_model(llama_config(vocab_size=64, eos_token_id=1, pad_token_id=0), 3, 0.2))


async def test_the_packed_tree_reads_as_the_unpacked_beams(engine):
    seq = Sequence([5, 6, 7], SamplingParams(max_tokens=20), 0)
    beams = [[11, 12, 13], [11, 12, 14], [9, 12, 13]]
    tree = DraftTree.merged(beams, 50, "m")
    want = ReadSpec(draw=None, logits=True)
    await engine.extend(seq)
    packed = await engine.expand(seq, tree, 0, want)
    for beam in beams:
        rows = await engine.extend(seq, tuple(beam), want, every=True)
        node = next(n for n in range(len(tree)) if [tree.tokens[each] for each in tree.path(n)] == beam)
        for place, on_path in enumerate(tree.path(node)):
            torch.testing.assert_close(packed[on_path].logits, rows[place + 1].logits, atol=1e-4, rtol=0)
    engine.release(seq)


async def test_embeddings_are_what_goes_into_the_first_layer(engine):
    seq = Sequence([5, 6, 7], SamplingParams(max_tokens=20), 0)
    rows = await engine.extend(seq, (9, 9), ReadSpec(draw=None, hidden=frozenset({0})), every=True)
    assert torch.equal(engine.embed([7, 9, 9]), torch.stack([row.hidden[0] for row in rows]))
    engine.release(seq)


@pytest.mark.parametrize("width", [1, 3])
async def test_a_head_that_knows_the_model_is_right_to_the_end(tmp_path, width):
    model = StateModel("large", AFTER)
    save_head(tmp_path, "redrafter", following_head(AFTER), model.digest)
    params = {"drafter": {"name": "redrafter", "width": width}, "draft_length": 3}
    seq = await answer(pool_of(model, tmp_path), "speculative", params, [0], temperature=0, max_tokens=9)
    assert [token.id for token in seq.generated] == [3, 5, 6, 1, 4, 2, 0, 3, 5]
    meter = seq.meter.speculation
    assert (meter.rounds, meter.accepted_tokens) == (3, 6)


async def test_the_recurrence_begins_at_the_pending_token(tmp_path):
    """A head whose hidden state is ignored goes on from the pending token, not from the one before it."""
    model = StateModel("large", AFTER)
    save_head(tmp_path, "redrafter", following_head(AFTER), model.digest)
    drafter = ReDrafterDrafter(ReDrafterParams(width=1))
    drafter.check(pool_of(model, tmp_path))
    seq = Sequence([0], SamplingParams(max_tokens=20), 0)
    empty = DraftTree.empty("m")
    verdict = await model.verify(seq, empty, MatchVerifier(), drafter.want | ReadSpec(draw=NoiseKind.SAMPLE))
    seq.extend(verdict.tokens, {"large": 1, "someone": 1})
    model.observe(seq, drafter, empty, verdict)
    tree = await model.propose(seq, drafter, DraftBudget(2, 2), FixedLength())
    assert (seq.tokens, tree.tokens) == ([0, 3], (5, 6))


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {}, {"temperature": 0.7, "top_p": 0.9}], ids=str)
async def test_a_random_head_leaves_the_answer_as_it_is(engine, tmp_path, sampling):
    save_head(tmp_path, "redrafter", random_head(64, 64), engine.digest)
    models = pool_of(engine, tmp_path)
    for seed in range(6):
        plain = await answer(models, "plain", {"model": "large"}, [seed, 9, 7], seed, **sampling)
        drafted = await answer(
            models, "speculative", {"drafter": "redrafter", "length": "fixed"}, [seed, 9, 7], seed, **sampling
        )
        assert drafted.tokens == plain.tokens
        assert drafted.meter.speculation.draft_tokens > 5 * (drafted.meter.speculation.rounds - 2)


async def test_more_beams_are_fed_as_fewer_tokens_than_they_have(engine, tmp_path):
    head = random_head(64, 64, std=0.1)
    save_head(tmp_path, "redrafter", head, engine.digest)
    seq = Sequence([5, 6, 7], SamplingParams(max_tokens=20), 0)
    sizes = {}
    for width in (1, 4, 10):
        drafter = ReDrafterDrafter(ReDrafterParams(width=width))
        drafter.check(pool_of(engine, tmp_path))
        [row] = await engine.extend(seq, want=drafter.want)
        drafter.observe(engine, seq, DraftTree.empty("m"), VerifyResult((), (), [row]))
        sizes[width] = len(await engine.propose(seq, drafter, DraftBudget(5, 512), FixedLength()))
    assert sizes[1] == 5 < sizes[4] < 20
    assert sizes[4] < sizes[10] < 50
    cut = await engine.propose(seq, drafter, DraftBudget(5, 7), FixedLength())
    assert len(cut) == 7
    engine.release(seq)


DEPTH, ANSWER = 5, 80
WIDTHS = [1, 2, 4, 10]


async def drawn_answers(folder, law: torch.Tensor, width: int) -> list[Sequence]:
    """Of a model that draws from the law, drafted by beams of a head that knows it."""
    model = LawModel("large", law)
    save_head(folder, "redrafter", knowing_head(law), model.digest)
    params = {"drafter": {"name": "redrafter", "width": width}, "draft_length": DEPTH}
    models = pool_of(model, folder)
    return [await answer(models, "speculative", params, [seed], seed, max_tokens=ANSWER) for seed in range(6)]


def law_of(size: int = 12) -> torch.Tensor:
    """Of the next token after each: some are nearly certain, most are not."""
    return (1.5 * torch.randn(size, size, generator=torch.Generator().manual_seed(0))).softmax(-1)


async def test_with_more_beams_more_is_accepted_and_far_fewer_tokens_are_fed_than_the_beams_have(tmp_path):
    """The text is the same: its noise is keyed, so that only the rounds differ."""
    done = {width: await drawn_answers(tmp_path, law_of(), width) for width in WIDTHS}
    assert all([seq.tokens for seq in each] == [seq.tokens for seq in done[1]] for each in done.values())
    accepted, packed = [], []
    for width, each in done.items():
        meters = [seq.meter.speculation for seq in each]
        rounds = sum(meter.rounds for meter in meters)
        accepted.append(sum(meter.accepted_tokens for meter in meters) / rounds)
        packed.append(sum(meter.draft_tokens for meter in meters) / rounds / (width * DEPTH))
    assert accepted == sorted(set(accepted))
    assert accepted[-1] > 1.5 * accepted[0]
    assert packed == sorted(set(packed), reverse=True)
    assert packed[-1] < 0.6


def chances(law: torch.Tensor, pending: int, width: int) -> list[float]:
    """That a round accepts a token of each depth: the probabilities of all that its beams have there, summed."""
    size = len(law)
    rows = torch.eye(size)
    beams = search_beams(knowing_head(law), lambda tokens: rows[tokens], torch.zeros(size), pending, width, DEPTH)
    beginnings = [{tuple(beam[:depth]) for beam in beams} for depth in range(1, DEPTH + 1)]
    return [
        sum(math.prod(float(law[a, b]) for a, b in itertools.pairwise((pending, *path))) for path in paths)
        for paths in beginnings
    ]


@pytest.mark.parametrize("width", [1, 10])
async def test_rounds_accept_as_much_as_their_beams_are_probable(tmp_path, width):
    """Summed over many rounds, within four deviations: nothing is lost between the search and the verdict."""
    law = law_of()
    excess = variance = 0.0
    for seq in await drawn_answers(tmp_path, law, width):
        ends = [place for place, token in enumerate(seq.generated) if token.kind is not TokenKind.ACCEPTED]
        for begins, end in itertools.pairwise(ends):
            if ANSWER - begins <= DEPTH + 2:
                break  # the answer's end cuts drafts
            reached = chances(law, seq.generated[begins].id, width)
            mean = sum(reached)
            excess += end - begins - 1 - mean
            variance += sum((2 * depth + 1) * chance for depth, chance in enumerate(reached)) - mean**2
    assert variance > 50
    assert abs(excess) < 4 * math.sqrt(variance)
