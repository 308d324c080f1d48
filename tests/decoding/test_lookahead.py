"""Lookahead decoding: the window's mask and places, what is harvested from it, and that the text stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decoding.drafters.base import DraftBudget
from decoding.drafters.lookahead import LookaheadDrafter, LookaheadParams, NgramPool, window_rows
from decoding.fakes import TableModel, markov
from decoding.lengths.fixed import FixedLength
from decoding.model import Readout
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult
from turnout.types import SamplingParams, Token

ROOM, LENGTH = DraftBudget(16, 160), FixedLength()


def drafter_of(**params: Any) -> LookaheadDrafter:
    return LookaheadDrafter(LookaheadParams(**params))


def mask_of(text: str) -> torch.Tensor:
    return torch.tensor([[cell == "1" for cell in line] for line in text.split()])


def test_the_window_of_three_columns_by_hand() -> None:
    """n-grams of 3: row 0 is a b at the places after the root, row 1 is c d e from one place after the root on."""
    extra = window_rows([[1, 2], [3, 4, 5]], num_nodes=2)
    assert extra.tokens == (1, 2, 3, 4, 5)
    assert extra.depths == (0, 1, 0, 1, 2)
    # Two guesses under verification come first: the window does not see them.
    assert extra.mask.equal(mask_of("0010000 0011000 0000100 0010010 0011001"))


def test_a_third_row_sees_its_column_of_the_rows_above() -> None:
    extra = window_rows([[1, 2], [3, 4, 5], [6, 7, 8]], num_nodes=0)
    assert extra.depths == (0, 1, 0, 1, 2, 1, 2, 3)
    assert extra.mask.equal(
        mask_of("10000000 11000000 00100000 10010000 11001000 00100100 10010010 11001001"),
    )


def outcome(extra_rows: list[int], nodes: int = 0) -> VerifyResult:
    """A round that emitted token 0; what the window read behind each of its rows."""
    rows = [Readout(top=((9, 0.0),))] * (1 + nodes) + [Readout(top=((token, 0.0),)) for token in extra_rows]
    return VerifyResult((), (Token(0, "m"),), rows)


async def propose(drafter: LookaheadDrafter, seq: Sequence) -> DraftTree:
    model = TableModel("m", lambda _: torch.zeros(16), 16)
    return await drafter.propose(model, seq, ROOM, LENGTH)


async def test_a_window_fills_harvests_and_moves_on() -> None:
    drafter = drafter_of(window=3, ngram=3, prompt_ngrams=False)
    seq = Sequence([7, 7, 7], SamplingParams(), 0)
    tree = await propose(drafter, seq)
    assert drafter.rows == [[7, 7, 7]]
    model: Any = None
    drafter.observe(model, seq, tree, outcome([1, 2, 3]))
    # The first row lost its first entry; what was read behind it and at the root is the second one.
    assert drafter.rows == [[7, 7], [1, 2, 3]]
    tree = await propose(drafter, seq)
    drafter.observe(model, seq, tree, outcome([0, 0, 4, 5, 6]))
    # A 3-gram per column: the token before it, row 1, and what was read behind row 1.
    assert drafter.pool.after(7) == [(3, 6), (2, 5), (1, 4)]
    assert drafter.rows == [[2, 3], [4, 5, 6]]
    # The pooled n-grams after the last token are the guesses of the next round, the latest first.
    tree = await propose(drafter, seq)
    assert (tree.tokens, tree.parents) == ((3, 6, 2, 5, 1, 4), (-1, 0, -1, 2, -1, 4))
    assert tree.extra is not None
    assert len(tree.extra.tokens) == 5


async def test_rounds_of_others_leave_the_window_alone() -> None:
    drafter = drafter_of(window=3, ngram=3)
    seq = Sequence([7, 7, 7], SamplingParams(), 0)
    await propose(drafter, seq)
    rows = [list(row) for row in drafter.rows]
    drafter.observe(None, seq, DraftTree.empty("m"), outcome([]))  # type: ignore[arg-type]
    assert drafter.rows == rows


@pytest.mark.parametrize("nodes", [1, 4, 5, 6, 8, 160])
async def test_guesses_and_window_together_are_no_more_than_the_nodes_asked_for(nodes: int) -> None:
    drafter, model = drafter_of(window=3, ngram=3), TableModel("m", lambda _: torch.zeros(16), 16)
    seq = Sequence([7, 1, 2, 7, 3, 4, 7], SamplingParams(), 0)
    drafter.rows = [[1, 2], [3, 4, 5]]
    drafter.pool.add(7, (1, 2))
    drafter.pool.add(7, (3, 4))
    tree = await drafter.propose(model, seq, DraftBudget(16, nodes), LENGTH)
    assert (tree.extra is None) == (nodes < 5)
    assert len(tree.fed_tokens) == min(nodes, 9 if nodes >= 5 else 4)
    drafter.observe(model, seq, tree, outcome([4, 5, 6, 7, 8], len(tree)))  # learns from a window, or from none


def test_the_pool_forgets_what_was_produced_longest_ago() -> None:
    pool = NgramPool(2)
    for continuation in ((1,), (2,), (1,), (3,)):
        pool.add(5, continuation)
    assert pool.after(5) == [(3,), (1,)]
    assert pool.after(6) == []


async def test_the_prompts_own_n_grams_are_guessed_where_asked() -> None:
    for prompt_ngrams, guesses in ((True, (2, 3)), (False, ())):
        drafter = drafter_of(window=2, ngram=3, prompt_ngrams=prompt_ngrams)
        tree = await propose(drafter, Sequence([1, 2, 3, 1], SamplingParams(), 0))
        assert tree.tokens == guesses


@pytest.mark.parametrize("ngram", [2, 3, 5])
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.8, "presence_penalty": 1}]
)
async def test_output_is_plain_decoding(run: Any, make_model: Any, ngram: int, sampling: dict[str, Any]) -> None:
    models = make_model("small", 1), make_model("large", 2, scale=6.0)
    accepted = 0
    for seed in range(6):
        plain = await run("plain", *models, seed=seed, max_tokens=40, **sampling)
        params = {"drafter": {"name": "lookahead", "ngram": ngram, "window": 5}}
        drafted = await run("speculative", *models, params, seed=seed, max_tokens=40, **sampling)
        assert drafted.ids == plain.ids
        accepted += drafted.seq.meter.speculation.accepted_tokens
    assert accepted > 0


async def test_a_full_match_also_brings_the_targets_own_token(run: Any) -> None:
    """A cycle, whose n-grams are all right once found: rounds of an n-gram's tokens, the last one the target's own."""
    large = TableModel("large", markov(torch.eye(5).roll(1, dims=1)), 5)
    params = {"drafter": {"name": "lookahead", "ngram": 4, "window": 5}}
    done = await run("speculative", large, large, params, prompt=(0, 1, 2, 3, 4, 0), temperature=0, max_tokens=60)
    lengths = [len(segment.tokens) for segment in done.segments[:-1]]
    assert done.ids == [(1 + place) % 5 for place in range(60)]
    assert lengths == [4, 1, *[4] * (len(lengths) - 2)]  # the prompt has no n-gram after 4
    assert done.segments[0].tokens[-1].kind == "bonus"


async def test_a_wider_window_needs_fewer_rounds(run: Any, make_model: Any) -> None:
    models = make_model("small", 1), make_model("large", 2, vocab=24, scale=6.0)
    rounds = []
    for window in (2, 8, 24):
        params = {"drafter": {"name": "lookahead", "ngram": 3, "window": window, "guesses": window}}
        made = [
            await run("speculative", *models, params, prompt=(seed, 2), temperature=0, max_tokens=60)
            for seed in range(12)
        ]
        rounds.append(sum(done.seq.meter.speculation.rounds for done in made))
    assert rounds[0] > rounds[1] > rounds[2]
