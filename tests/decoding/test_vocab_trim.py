"""A trimmed vocabulary: which ids stay, what is drafted from them, and that the target's law does not notice."""

import pytest
import torch

from decoding.drafters.base import Candidates, DraftBudget
from decoding.drafters.model_chain import ModelChainDrafter
from decoding.drafters.vocab_trim import REFRESH_AFTER, TokenCounts, VocabTrimDrafter, VocabTrimParams
from decoding.fakes import TableModel, markov
from decoding.lengths.fixed import FixedLength, FixedParams
from decoding.sequence import Sequence
from decoding.verifiers.rejection import RejectionVerifier
from tests.decoding.markov_rounds import p_value
from turnout.types import SamplingParams

ROOM, LENGTH = DraftBudget(5, 5), FixedLength(FixedParams(most=5))


@pytest.mark.parametrize("kind", [Candidates.FIXED, Candidates.DRAWN])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0}, {"top_k": 3, "frequency_penalty": 0.5}], ids=str)
async def test_the_whole_vocabulary_gives_the_drafts_of_a_chain(make_model, kind, sampling):
    model = make_model("small", 3)
    for seed in range(20):
        seq = Sequence([seed % 12, 2], SamplingParams(**sampling), seed)
        chain = await ModelChainDrafter(candidates=kind).propose(model, seq, ROOM, LENGTH)
        trimmed = await VocabTrimDrafter(candidates=kind).propose(model, seq, ROOM, LENGTH)
        assert trimmed.tokens == chain.tokens
        for mine, theirs in zip(trimmed.proposals, chain.proposals, strict=True):
            assert mine.equal(theirs)


async def test_only_kept_tokens_and_ends_are_drafted_from_their_own_distribution(make_model):
    model = make_model("small", 3)
    drafted = set()
    for seed in range(60):
        drafter = VocabTrimDrafter(VocabTrimParams(keep=4), Candidates.DRAWN)
        seq = Sequence([1, 2], SamplingParams(), seed, (9,))
        tree = await drafter.propose(model, seq, ROOM, LENGTH)
        drafted |= set(tree.tokens)
        context = list(seq.tokens)
        for token, proposal in zip(tree.tokens, tree.proposals, strict=True):
            whole = model.next_logits(context).softmax(-1)
            kept = torch.zeros(12)
            kept[[0, 1, 2, 3, 9]] = whole[[0, 1, 2, 3, 9]]
            assert torch.allclose(proposal, kept / kept.sum(), atol=1e-6)
            context.append(token)
    assert 9 in drafted
    assert drafted <= {0, 1, 2, 3, 9}


def test_the_most_frequent_ids_are_kept_and_the_ends():
    counts = TokenCounts(6, 2)

    def kept(*ends):
        return counts.kept(frozenset(ends)).ids.tolist()

    assert kept() == [0, 1]
    counts.add([5] * REFRESH_AFTER + [3] * 3)
    assert (kept(), kept(1, 3), kept(4, 99)) == ([3, 5], [1, 3, 5], [3, 4, 5])
    counts.add([4] * (REFRESH_AFTER - 1))
    assert kept() == [3, 5]
    assert counts.kept(frozenset()) is counts.kept(frozenset())
    counts.add([4])
    assert kept() == [4, 5]
    assert TokenCounts(6, 6).kept(frozenset()) is None


def test_counts_say_how_large_they_are():
    counts, ends = TokenCounts(1000, 100), frozenset({5})
    assert counts.nbytes == 8 * 1000
    counts.kept(ends)
    assert counts.nbytes == 8 * (1000 + 100)


async def test_the_targets_tokens_are_counted_by_tenant_and_domain(run, make_model):
    small, large = make_model("small", 1), make_model("large", 2)
    params = {"drafter": {"name": "vocab_trim", "keep": 3, "domain": "code"}}
    done = await run("speculative", small, large, params)
    counted = small.stores.open("vocab_trim/12/3/code", "default", lambda: TokenCounts(12, 3))
    expected = torch.bincount(torch.tensor(done.ids), minlength=12)
    # What a last round emitted past the end of the answer was the target's too.
    assert (counted._counts >= expected).all()
    assert counted._counts.sum() - expected.sum() <= 16
    assert not small.stores.open("vocab_trim/12/3/chat", "default", lambda: TokenCounts(12, 3))._counts.any()


async def test_prompts_are_counted_once_where_asked(make_model):
    model, seq = make_model("small", 3), Sequence([5, 5, 7], SamplingParams(), 0)
    drafter = VocabTrimDrafter(VocabTrimParams(keep=3, count_prompts=True))
    for _ in range(2):
        await drafter.propose(model, seq, ROOM, LENGTH)
    counts = model.stores.open("vocab_trim/12/3/default", "default", lambda: TokenCounts(12, 3))._counts
    assert (counts[5], counts[7], counts.sum()) == (2, 1, 3)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "top_p": 0.9}], ids=["raw", "top_p"])
def test_dropped_tokens_appear_as_often_as_the_target_says(sampling):
    drafter = VocabTrimDrafter(VocabTrimParams(keep=2), Candidates.DRAWN)
    assert p_value(drafter, RejectionVerifier(), 500, DraftBudget(2, 2), **sampling) > 1e-3


async def test_acceptance_grows_with_what_is_kept(run):
    table = torch.full((8, 8), 1 / 8)
    small, large = TableModel("small", markov(table), 8), TableModel("large", markov(table), 8)
    accepted = []
    for keep in (1, 4, 8):
        params = {"drafter": {"name": "vocab_trim", "keep": keep}, "verifier": "rejection", "draft_length": 4}
        done = [await run("speculative", small, large, params, seed=seed, max_tokens=40) for seed in range(10)]
        accepted.append(sum(each.seq.meter.speculation.accepted_tokens for each in done))
    assert accepted[0] < accepted[1] < accepted[2]


async def test_a_draft_bound_by_its_bytes_pays_most_with_a_part_of_its_head(run):
    """Frequent ids are worth their rows and rare ones are not: tokens a round over 1 + depth times the draft's bytes,
    in those of the target, have their maximum between the smallest head and the whole one."""
    size, depth = 64, 4
    table = (1 / torch.arange(1.0, size + 1) ** 1.5).expand(size, size)
    small, large = (TableModel(name, markov(table / table.sum(-1, keepdim=True)), size) for name in ("small", "large"))
    layers, row, whole = 4.0, 0.5, 200.0  # bytes, in any unit: the draft's layers, a row of its head, the target
    keeps, worth = (1, 4, 16, 64), []
    for keep in keeps:
        params = {"drafter": {"name": "vocab_trim", "keep": keep}, "verifier": "rejection", "draft_length": depth}
        done = [await run("speculative", small, large, params, prompt=(0,), seed=s, max_tokens=100) for s in range(6)]
        per_round = 600 / sum(each.seq.meter.speculation.rounds for each in done)
        worth.append(per_round / (1 + depth * (layers + keep * row) / whole))
    assert worth[0] < worth[1] < worth[2]
    assert worth[2] > 1.08 * worth[3]


SMALL = ["model_chain", "model_tree", "model_sequences", "rsd_c", "rsd_s", "sequoia", "dyspec", "staged", "rasd"]


def around(name: str, kind: Candidates | None = None, keep: int = 12) -> VocabTrimDrafter:
    return VocabTrimDrafter(VocabTrimParams(drafter={"name": name}, keep=keep), kind)


@pytest.mark.parametrize("name", SMALL)
async def test_around_any_drafter_of_the_small_model_the_whole_vocabulary_changes_nothing(make_model, name):
    """Same tokens, same tree, same distributions as without the trim."""
    inside = VocabTrimDrafter.inside(VocabTrimParams(drafter={"name": name}))
    for kind in sorted(inside.kinds):
        for seed in range(5):
            seq = Sequence([seed % 12, 2], SamplingParams(top_p=0.9), seed)
            whole = await inside(candidates=kind).propose(make_model("small", 3), seq, DraftBudget(4, 16), LENGTH)
            trimmed = await around(name, kind).propose(make_model("small", 3), seq, DraftBudget(4, 16), LENGTH)
            assert (trimmed.tokens, trimmed.parents, trimmed.sequences) == (
                whole.tokens,
                whole.parents,
                whole.sequences,
            )
            for mine, theirs in zip(trimmed.proposals, whole.proposals, strict=True):
                assert (mine is None and theirs is None) or mine.equal(theirs)


@pytest.mark.parametrize("name", SMALL)
async def test_around_any_drafter_only_kept_tokens_are_drafted(make_model, name):
    inside = VocabTrimDrafter.inside(VocabTrimParams(drafter={"name": name}))
    for kind in sorted(inside.kinds):
        drafted = set()
        for seed in range(10):
            # Nothing of the text is a kept token, so that what is retrieved from it is none either.
            seq = Sequence([5 + seed % 3, 8], SamplingParams(), seed, (9,))
            tree = await around(name, kind, keep=4).propose(make_model("small", 3), seq, DraftBudget(4, 16), LENGTH)
            drafted |= set(tree.tokens)
            assert all(proposal is None or not proposal[[4, 5, 6, 7, 8, 10, 11]].any() for proposal in tree.proposals)
        assert drafted <= {0, 1, 2, 3, 9}
        assert len(drafted) > 2


@pytest.mark.parametrize("name", ["rsd_s", "sequoia", "dyspec"])
def test_trimmed_trees_keep_the_targets_law(name):
    assert p_value(around(name, Candidates.DRAWN, keep=2), RejectionVerifier(), 500, DraftBudget(2, 5)) > 1e-3


@pytest.mark.exactness
@pytest.mark.parametrize("name", ["rsd_c", "rsd_s", "sequoia", "dyspec", "staged", "rasd"])
def test_trimmed_trees_keep_the_targets_law_over_many_runs(name):
    assert p_value(around(name, Candidates.DRAWN, keep=2), RejectionVerifier(), 200_000, DraftBudget(2, 5)) > 1e-3


async def test_what_the_drafter_inside_learns_is_kept_apart(run, make_model):
    small, large = make_model("small", 1), make_model("large", 2)
    params = {"drafter": {"name": "vocab_trim", "keep": 4, "drafter": "sequoia"}}
    plain = await run("plain", small, large)
    drafted = await run("speculative", small, large, params)
    assert drafted.ids == plain.ids
    kinds = [kind for kind, _ in small.stores._stores]
    assert sorted(kinds) == ["vocab_trim/12/4/default", "vocab_trim/12/4/default/stores"]
