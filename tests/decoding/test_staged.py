"""The second stage changes nothing but the number of draft forwards; its tri-grams by hand."""

import pytest

from decoding import backoff_ngrams
from decoding.backoff_ngrams import BackoffNgrams
from decoding.drafters.base import Candidates, DraftBudget
from decoding.drafters.dyspec import DySpecDrafter
from decoding.drafters.model_tree import ModelTreeDrafter
from decoding.drafters.staged import StagedDrafter, StagedParams
from decoding.lengths.fixed import FixedLength
from decoding.sequence import Sequence
from turnout.types import SamplingParams

LENGTH, ROOM = FixedLength(), DraftBudget(6, 20)


@pytest.mark.parametrize("kind", [Candidates.FIXED, Candidates.DRAWN])
async def test_trees_are_those_of_the_draft_model_alone(make_model, kind):
    alone = ModelTreeDrafter() if kind is Candidates.FIXED else DySpecDrafter()
    plain, guessed = make_model("small", 6), make_model("small", 6)
    staged = StagedDrafter(candidates=kind)
    for seed in range(40):
        seqs = [Sequence([seed % 12, 2 + seed % 3], SamplingParams(), seed) for _ in range(2)]
        expected = await alone.propose(plain, seqs[0], ROOM, LENGTH)
        tree = await staged.propose(guessed, seqs[1], ROOM, LENGTH)
        assert (tree.tokens, tree.parents) == (expected.tokens, expected.parents)
        for mine, theirs in zip(tree.proposals, expected.proposals, strict=True):
            assert mine.equal(theirs)
    assert guessed.forwards < plain.forwards


async def test_a_foreseen_draft_takes_fewer_forwards(make_model):
    """Once the contexts are known, fewer forwards than the tree has levels, and than the first stage alone needs."""
    forwards = {}
    prompts = [(first, second) for first in range(12) for second in range(12)]
    for guesses in (0, 16):
        model, levels = make_model("small", 6, scale=6.0), 0
        staged = StagedDrafter(StagedParams(guesses=guesses))
        for lap in range(2):
            for prompt in prompts:
                tree = await staged.propose(model, Sequence(prompt, SamplingParams(), 0), DraftBudget(6, 12), LENGTH)
                levels += max(tree.depths()) + 1 if lap else 0
            if lap == 0:
                model.forwards = 0
        forwards[guesses] = model.forwards
    assert forwards[16] < 0.7 * forwards[0]
    assert forwards[16] < 0.7 * levels


async def test_no_guesses_no_second_stage(make_model):
    model, other = make_model("small", 6), make_model("small", 6)
    seq, twin = (Sequence([1, 2], SamplingParams(), 0) for _ in range(2))
    await StagedDrafter(StagedParams(guesses=0)).propose(model, seq, ROOM, LENGTH)
    await ModelTreeDrafter().propose(other, twin, ROOM, LENGTH)
    assert (model.forwards, model.fed_tokens) == (other.forwards, other.fed_tokens)


async def test_tenants_do_not_see_each_others_tri_grams(make_model):
    model = make_model("small", 6)
    for tenant in ("one", "two"):
        await StagedDrafter().propose(model, Sequence([1, 2], SamplingParams(), 0, tenant=tenant), ROOM, LENGTH)
    one, two = (model.stores.open("staged", tenant, BackoffNgrams) for tenant in ("one", "two"))
    assert one is not two
    assert one.chances([1, 2]) == two.chances([1, 2])


def test_back_off_by_hand():
    ngrams = BackoffNgrams()
    assert ngrams.chances([1, 2]) == {}
    ngrams.learn([1, 2], [(7, 1.0)])
    ngrams.learn([3, 2], [(8, 1.0)])
    ngrams.learn([3, 2], [(8, 1.0)])
    # None: 7 once, 8 twice of three. After 2 the same. After (1, 2): 7 once; one half kept back, all of it for 8.
    assert ngrams.chances([1, 2]) == pytest.approx({7: 0.5, 8: 0.5})
    # After (3, 2): 8 twice; 1 / (1 + 2) kept back for 7.
    assert ngrams.chances([3, 2]) == pytest.approx({8: 2 / 3, 7: 1 / 3})
    assert ngrams.chances([9, 2]) == pytest.approx({7: 1 / 3, 8: 2 / 3})
    assert ngrams.chances([9, 9]) == pytest.approx({7: 1 / 3, 8: 2 / 3})
    ngrams.learn([5, 6], [(1, 0.25), (2, 0.75)])
    assert sum(ngrams.chances([5, 6]).values()) == pytest.approx(1.0)


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(backoff_ngrams, "MOST_CONTEXTS", 10)
    monkeypatch.setattr(backoff_ngrams, "MOST_TOKENS", 3)
    ngrams = BackoffNgrams()
    for token in range(40):
        ngrams.learn([token, token + 1], [(token, 1.0 + token)])
    assert len(ngrams._rows) <= 10
    assert set(ngrams.chances([100, 101])) == {37, 38, 39}
    assert ngrams.chances([39, 40])[39] > 0.9
