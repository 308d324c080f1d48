"""Token Recycling: the matrix, the template, and what they draft."""

import pytest
import torch

from decoding.drafters._readings import readings
from decoding.drafters.base import DraftBudget
from decoding.drafters.token_recycling import (
    GUESSES,
    LEVELS,
    UNKNOWN,
    TokenRecyclingDrafter,
    fill,
    template_levels,
)
from decoding.fakes import TableModel
from decoding.lengths.fixed import FixedLength
from decoding.model import Readout
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from decoding.verifiers.base import VerifyResult
from turnout.types import SamplingParams, Token

PARAMS = {"drafter": "token_recycling"}


def sequence(prompt: list[int], tenant: str = "default", **sampling) -> Sequence:
    return Sequence(prompt, SamplingParams(**sampling), 0, eos_ids=(9,), tenant=tenant)


@pytest.fixture
def model() -> TableModel:
    return TableModel("large", lambda tokens: torch.zeros(12), 12)


def row(*top: int) -> Readout:
    return Readout(top=tuple((token, -float(rank)) for rank, token in enumerate(top)))


def test_the_template_is_the_papers():
    assert [len(ranks) for _, ranks in LEVELS] == [8, 21, 25, 15, 8, 3]
    assert (TokenRecyclingDrafter.nodes, TokenRecyclingDrafter.depth) == (80, 6)
    # The deepest nodes, by the ranks on the way to each.
    paths = [""]
    for parents, ranks in LEVELS:
        paths = [f"{paths[parent]}{rank}" for parent, rank in zip(parents.tolist(), ranks.tolist(), strict=True)]
    assert paths == ["000000", "000001", "000100"]


def test_a_small_template_filled_by_hand():
    matrix = torch.full((8, GUESSES), UNKNOWN, dtype=torch.int32)
    matrix[3, :2] = torch.tensor([4, 5])
    matrix[4, :2] = torch.tensor([6, 0])
    levels = template_levels({"": 2, "0": 1})
    draft = fill(matrix, 3, levels, 80, "m")
    assert (draft.tokens, draft.parents) == ((4, 5, 6), (ROOT, ROOT, 0))
    assert fill(matrix, 3, levels, 2, "m").tokens == (4, 5)
    assert len(fill(matrix, 7, levels, 80, "m")) == 0


@pytest.mark.parametrize(("depth", "nodes"), [(6, 80), (6, 30), (2, 80), (1, 3), (6, 1)])
async def test_drafts_keep_to_their_room(model: TableModel, depth: int, nodes: int):
    seq = sequence([1, 2])
    whole = torch.stack([torch.randperm(12)[:GUESSES] for _ in range(12)]).int()
    model.stores.open("token_recycling/12", "default", lambda: whole)
    draft = await TokenRecyclingDrafter().propose(model, seq, DraftBudget(depth, nodes), FixedLength())
    levels = [8, 21, 25, 15, 8, 3][:depth]
    assert len(draft) == min(nodes, sum(levels))
    assert max(draft.depths()) < depth
    assert draft.depths() == sorted(draft.depths())  # breadth first
    for parent in range(ROOT, len(draft)):
        siblings = [draft.tokens[child] for child in draft.children(parent)]
        assert len(set(siblings)) == len(siblings)
        assert siblings == whole[draft.tokens[parent] if parent >= 0 else 2].tolist()[: len(siblings)]


def test_everything_read_is_kept_and_the_accepted_path_has_the_last_word(model: TableModel):
    seq, drafter = sequence([1, 2]), TokenRecyclingDrafter()
    draft = DraftTree((3, 4, 5, 3), (ROOT, ROOT, 0, 0), "m")
    rows = [row(3, 4), row(5, 6), row(7, 8), row(6, 1), row(0, 11)]
    verdict = VerifyResult((0, 2), tuple(Token(token, "m") for token in (3, 5, 6)), rows)
    seq.extend(verdict.tokens, {"m": 1})
    drafter.observe(model, seq, draft, verdict)
    matrix = model.stores.open("token_recycling/12", "default", dict)
    assert matrix[2, :3].tolist() == [3, 4, UNKNOWN]
    assert matrix[4, :2].tolist() == [7, 8]  # rejected
    assert matrix[5, :2].tolist() == [6, 1]
    assert matrix[3, :2].tolist() == [5, 6]  # twice: accepted, and rejected later in the tree
    assert (matrix[[0, 1, 6, 7]] == UNKNOWN).all()


def test_what_is_read_stands_after_its_own_tokens_also_when_the_answer_is_cut():
    seq = sequence([1, 2], max_tokens=10)
    draft = DraftTree((9, 4, 5), (ROOT, 0, 1), "m")
    rows = [row(token) for token in range(4)]
    verdict = VerifyResult((0, 1), tuple(Token(token, "m") for token in (9, 4, 6)), rows)
    assert len(seq.extend(verdict.tokens, {"m": 1})) == 1  # 9 ends it
    assert [(context, each.top[0][0]) for context, each in readings(seq, draft, verdict, 2)] == [
        ((4, 5), 3),
        ((1, 2), 0),
        ((2, 9), 1),
        ((9, 4), 2),
    ]


@pytest.mark.parametrize("verifier", ["match", "rejection"])
async def test_output_is_plain_decoding(run, make_model, verifier):
    small, large = make_model("small", 1), make_model("large", 2)
    accepted = 0
    for seed in range(12):
        temperature = float(seed % 2) if verifier == "match" else 0.0
        sampling = {"seed": seed, "temperature": temperature, "max_tokens": 30, "prompt": (seed % 12, 1)}
        plain = await run("plain", small, large, **sampling)
        done = await run("speculative", small, large, {**PARAMS, "verifier": verifier}, **sampling)
        assert done.ids == plain.ids
        accepted += done.seq.meter.speculation.accepted_tokens
    assert accepted > 80


async def test_a_cold_matrix_warms_up_and_stays(run, make_model):
    small, large = make_model("small", 1, vocab=40), make_model("large", 2, vocab=40)
    rounds = []
    for _ in range(2):
        done = await run("speculative", small, large, PARAMS, temperature=0, max_tokens=60)
        rounds.append([len(segment.tokens) for segment in done.segments])
    cold, warm = rounds
    assert cold[0] == 1
    assert len(warm) < len(cold) < 60


async def test_tenants_do_not_see_each_others_tokens(model: TableModel):
    drafter, room = TokenRecyclingDrafter(), DraftBudget(6, 80)
    seq = sequence([1, 2], "one")
    verdict = VerifyResult((), (Token(2, "m"),), [row(2, 5)])
    seq.extend(verdict.tokens, {"m": 1})
    drafter.observe(model, seq, DraftTree.empty("m"), verdict)
    assert (await drafter.propose(model, seq, room, FixedLength())).tokens[:2] == (2, 5)
    assert len(await drafter.propose(model, sequence([1, 2], "two"), room, FixedLength())) == 0
