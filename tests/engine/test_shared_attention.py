"""Attention over prefixes that sequences of a batch share: each read once, and nobody's numbers change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from decoding.sequence import Sequence
from engine.attention import grouped, sdpa
from engine.attention.grouped import GroupedStep, Joined
from engine.attention.layout import Layout, lay_out
from engine.attention.prefixes import Prefixes, find_prefixes
from engine.attention.sdpa import SdpaStep
from engine.attention.step import AttentionStep, Scores
from engine.backends.base import NativeBackend
from engine.backends.native.attention import NativeStep
from engine.cache.paged_kv import PagedKV
from tests.engine.families import Family, Member, families, inputs, sinks_of, store_of
from tests.engine.harness import twins
from tests.engine.margin import assert_best
from tests.properties import cases
from training.random_models import llama_config
from turnout.types import SamplingParams

SHAPES = [(4, 2, 8), (3, 3, 20), (8, 1, 64), (70, 1, 4), (2, 2, 96)]


def attended(
    family: Family,
    shape: tuple[int, int, int],
    scores: Scores,
    prefixes: Prefixes | None,
    dtype: torch.dtype = torch.float32,
    step: Any = NativeStep,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a step makes of a family with these prefixes, and torch's plain attention."""
    query, pairs, cache = inputs(family, shape, dtype)
    layout = family.layout()
    steps = (step(layout, store_of(cache), prefixes), SdpaStep(layout, store_of(cache)))
    mine, plain = (one.attend(0, query, pairs, scores).float() for one in steps)
    return mine, plain


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Kernels use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


class TestAttention:
    @pytest.mark.parametrize("shape", SHAPES)
    @given(family=families(), softcap=st.none() | st.just(5.0), sinks=st.booleans(), num_threads=st.integers(1, 3))
    @cases(30)
    def test_equals_plain_attention_for_any_forest(
        self, shape: tuple[int, int, int], family: Family, softcap: float | None, sinks: bool, num_threads: int
    ) -> None:
        found = find_prefixes(family.layout(), 1, 1)
        scores = Scores(0.3, softcap=softcap, sinks=sinks_of(shape[0]) if sinks else None)
        with threads(num_threads):
            mine, plain = attended(family, shape, scores, found)
        torch.testing.assert_close(mine, plain, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("shape", SHAPES)
    @given(family=families(), softcap=st.none() | st.just(5.0), sinks=st.booleans())
    @cases(20)
    def test_torch_operations_do_the_same(
        self, shape: tuple[int, int, int], family: Family, softcap: float | None, sinks: bool
    ) -> None:
        found = find_prefixes(family.layout(), 1, 1)
        assume(found is not None)
        scores = Scores(0.3, softcap=softcap, sinks=sinks_of(shape[0]) if sinks else None)
        mine, plain = attended(family, shape, scores, found, step=GroupedStep)
        torch.testing.assert_close(mine, plain, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("step", [NativeStep, GroupedStep])
    @given(family=families(keeps_trees=False), bound=st.sampled_from(("window", "chunk")), width=st.integers(1, 90))
    @cases(40)
    def test_a_window_or_chunk_that_cuts_into_a_prefix_is_kept(
        self, step: Any, family: Family, bound: str, width: int
    ) -> None:
        found = find_prefixes(family.layout(), 1, 1)
        assume(found is not None)
        scores = replace(Scores(0.3), **{bound: width})
        mine, plain = attended(family, (4, 2, 8), scores, found, step=step)
        torch.testing.assert_close(mine, plain, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("most_rows", [1, 3])
    def test_scores_take_no_more_memory_than_is_allowed(self, most_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
        members = (Member(0, 38, 5), Member(0, 30, 8, 6), Member(0, 9, 8, 10, 2), Member(0, 2), Member(-1, 9, 7))
        family, heads, attend = Family(((-1, 12),), members), 4, grouped._attend
        most, taken = 4 * heads * 48 * most_rows, list[int]()

        def noting(part: Any, query: torch.Tensor, *args: Any) -> Any:
            taken.append(4 * heads * len(query) * part.keys)
            return attend(part, query, *args)

        monkeypatch.setattr(grouped, "SCORE_BYTES", most)
        monkeypatch.setattr(grouped, "_attend", noting)
        found = find_prefixes(family.layout(), 1, 1)
        mine, plain = attended(family, (heads, 2, 8), Scores(0.3), found, step=GroupedStep)
        torch.testing.assert_close(mine, plain, atol=1e-5, rtol=0)
        assert 0 < max(taken) <= most

    @pytest.mark.parametrize("most_rows", [1, 3])
    def test_torch_weighs_in_pieces_what_it_has_no_operation_for(
        self, most_rows: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        members = (Member(-1, 0, 8), Member(-1, 30, 8, 6), Member(-1, 2), Member(-1, 9))
        family, scores = Family(((-1, 1),), members), Scores(0.3, softcap=5.0, sinks=sinks_of(4))
        monkeypatch.setattr(sdpa, "SCORE_BYTES", 4 * 4 * 38 * most_rows)
        mine, plain = attended(family, (4, 2, 8), scores, None)
        torch.testing.assert_close(mine, plain, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("scores", [Scores(0.3, softcap=5.0), Scores(0.3, sinks=sinks_of(4))])
    def test_a_mask_that_torch_does_not_imply_is_made_once_for_all_layers(
        self, scores: Scores, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made, original = list[int](), sdpa.tree_mask

        def noting(count: int, *arguments: Any) -> torch.Tensor:
            made.append(count)
            return original(count, *arguments)

        monkeypatch.setattr(sdpa, "tree_mask", noting)
        family = Family(((-1, 1),), (Member(-1, 0, 8), Member(-1, 30, 7)))
        query, pairs, cache = inputs(family, (4, 2, 8), torch.float32)
        step = SdpaStep(family.layout(), store_of(cache))
        for _ in range(3):
            step.attend(0, query, pairs, scores)
        assert made == [8, 7]

    @given(family=families())
    @cases(30)
    def test_in_bfloat16_it_is_within_rounding(self, family: Family) -> None:
        found = find_prefixes(family.layout(), 1, 1)
        mine, plain = attended(family, (8, 2, 64), Scores(0.1), found, torch.bfloat16)
        torch.testing.assert_close(mine, plain, atol=0.03, rtol=0)

    @pytest.mark.parametrize("fed", [1, 5, 150])
    def test_long_prefixes_and_many_rows_are_cut_into_pieces(self, fed: int) -> None:
        family = Family(((-1, 200), (0, 70)), tuple(Member(i % 2, 3 * i, fed) for i in range(6)), 16)
        found = find_prefixes(family.layout())
        assert found is not None
        assert (found.nodes["spans"] > 1).any() == (fed < 150)
        with threads(2):
            mine, plain = attended(family, (8, 2, 16), Scores(0.25), found)
        torch.testing.assert_close(mine, plain, atol=1e-5, rtol=0)

    @given(family=families())
    @cases(30)
    def test_a_request_gets_what_it_would_get_alone(self, family: Family) -> None:
        mine, _ = attended(family, (4, 2, 8), Scores(0.3), find_prefixes(family.layout(), 1, 1))
        alone, _ = attended(family, (4, 2, 8), Scores(0.3), None)
        torch.testing.assert_close(mine, alone, atol=1e-5, rtol=0)

    def test_numbers_of_one_row_reach_no_other(self) -> None:
        family = Family(((-1, 20), (0, 4)), (Member(1, 5), Member(0, 1), Member(1, 0, 3), Member(0, 2)))
        layout, scores = family.layout(), Scores(0.3)
        found = find_prefixes(layout, 1, 1)
        query, pairs, cache = inputs(family, (4, 2, 8), torch.float32)
        expected = NativeStep(layout, store_of(cache), found).attend(0, query, pairs, scores)
        first = query.clone()
        first[0] = float("nan")
        pairs[0] = float("inf")
        got = NativeStep(layout, store_of(cache), found).attend(0, first, pairs, scores)
        assert not got[0].isfinite().any()
        assert torch.equal(got[1:], expected[1:])

    @pytest.mark.parametrize("step", [NativeStep, GroupedStep, SdpaStep])
    @pytest.mark.parametrize("softcap", [None, 5.0])
    def test_what_stands_in_slots_that_no_sequence_has_filled_reaches_no_row(
        self, step: Any, softcap: float | None
    ) -> None:
        members = (Member(0, 5), Member(0, 1), Member(0, 18), Member(-1, 9), Member(-1, 30, 3))
        family = Family(((-1, 20),), members, seed=7)
        layout, scores = family.layout(), Scores(0.3, softcap=softcap)
        query, pairs, cache = inputs(family, (4, 2, 8), torch.float32)
        size, filled = layout.block_size, torch.zeros(len(cache), dtype=torch.bool)
        for blocks, length in zip(layout.blocks, layout.lengths.tolist(), strict=True):
            filled[[int(blocks[key // size]) * size + key % size for key in range(length)]] = True
        assert not filled[:size].any()  # the block that stands in for those that a table lacks
        broken = cache.masked_fill(~filled[:, None, None, None], float("nan"))
        found = () if step is SdpaStep else (find_prefixes(layout, 1, 1),)
        out = [step(layout, store_of(each), *found).attend(0, query, pairs, scores) for each in (cache, broken)]
        assert torch.equal(*out)

    @pytest.mark.parametrize(
        ("field", "node", "value"), [("begin_key", 0, 4), ("end_key", 0, 76), ("sequence", 0, 0), ("parent", 1, -1)]
    )
    def test_a_wrong_forest_would_be_seen(self, field: str, node: int, value: int) -> None:
        family = Family(((-1, 20), (0, 4)), (Member(-1, 90), Member(1, 5), Member(0, 1), Member(1), Member(0, 2)))
        found = find_prefixes(family.layout(), 1, 1)
        assert found is not None
        found.nodes[field][node] = value
        mine, plain = attended(family, (4, 2, 8), Scores(0.3), found)
        assert (mine - plain).abs().max() > 1e-3

    def test_joining_by_hand(self) -> None:
        # In the prefix: scores ln 1 and ln 3, values 1 and 5; after it: score ln 4, value 2.
        layout = lay_out([0, 0], [1, 1], [2, 2], [np.array([0, 1, 2]), np.array([0, 1, 3])], 1, {})
        cache = torch.zeros(4, 2, 1, 2)
        cache[:2, 0, 0, 0] = torch.tensor([1.0, 3.0]).log()
        cache[:2, 1, 0, 0] = torch.tensor([1.0, 5.0])
        pairs = torch.zeros(2, 2, 1, 2)
        pairs[:, 0, 0, 0], pairs[:, 1, 0, 0] = torch.tensor(4.0).log(), 2.0
        query = torch.tensor([1.0, 0.0]).expand(2, 1, 2).contiguous()
        found = find_prefixes(layout, 1, 1)
        assert found is not None
        for step in (NativeStep, GroupedStep):
            out = step(layout, store_of(cache), found).attend(0, query, pairs, Scores(1.0))
            torch.testing.assert_close(out[:, 0, 0], torch.full((2,), (1 * 1 + 3 * 5 + 4 * 2) / 8))

    def test_joining_two_parts_by_hand(self) -> None:
        joined = Joined(torch.zeros(2, 1, 1))
        row = torch.tensor([1])
        # Weights 1 and 3 on values 1 and 5 are 4 on their mean, 4; then comes 12 on 2.
        joined.join(row, torch.tensor([[[4.0]]]), torch.tensor([[4.0]]).log())
        assert joined.values[1].item() == 4.0
        joined.join(row, torch.tensor([[[2.0]]]), torch.tensor([[12.0]]).log())
        torch.testing.assert_close(joined.values[1], torch.tensor([[(4 * 4 + 12 * 2) / 16]]))
        torch.testing.assert_close(joined.weights[1], torch.tensor([16.0]).log())
        assert joined.values[0].item() == 0


class TestReads:
    def read(self, family: Family, shares: bool, window: int | None = None) -> int:
        """Keys of one KV head that are read."""
        query, pairs, cache = inputs(family, (4, 2, 8), torch.float32)
        step = NativeStep(family.layout(), store_of(cache), find_prefixes(family.layout(), 1, 1) if shares else None)
        step.attend(0, query, pairs, Scores(0.3, window))
        assert step.keys_read % 2 == 0
        return step.keys_read // 2

    def test_a_prefix_is_read_once(self) -> None:
        family = Family(((-1, 250),), tuple(Member(0, 3 * i) for i in range(32)))
        suffixes = sum(3 * i + 1 for i in range(32))
        # What a member has of a whole block beyond the prefix is its own.
        assert self.read(family, shares=True) == 1000 + suffixes
        assert self.read(family, shares=False) == 32 * 1000 + suffixes

    def test_every_level_is_read_once(self) -> None:
        runs = ((-1, 50), (0, 20), (0, 30), (2, 10))
        members = (Member(1, 7), Member(1, 0), Member(2, 1), Member(3, 2), Member(3, 3), Member(3, 0, fed=4))
        suffixes = 8 + 1 + 2 + 3 + 4 + 4
        assert self.read(Family(runs, members), shares=True) == 4 * (50 + 20 + 30 + 10) + suffixes

    def test_a_window_that_cuts_into_it_reads_no_more_than_the_window(self) -> None:
        family = Family(((-1, 250),), (Member(0, 4), Member(0, 4)))
        assert self.read(family, shares=True, window=100) == 2 * 100
        assert self.read(family, shares=True, window=1005) == 1000 + 2 * 5


class Watching(NativeBackend):
    """Keeps the steps it makes."""

    def __init__(self, shared_attention: bool) -> None:
        super().__init__(shared_attention)
        self.steps: list[tuple[Layout, NativeStep]] = []

    def step(self, layout: Layout, store: PagedKV) -> AttentionStep:
        step = super().step(layout, store)
        assert isinstance(step, NativeStep)
        self.steps.append((layout, step))
        return step


@pytest.mark.parametrize("shared_attention", [True, False])
async def test_requests_over_one_prompt_answer_as_the_plain_model_does(shared_attention: bool) -> None:
    config = llama_config(60, hidden_size=32, intermediate_size=48, pad_token_id=0, eos_token_id=1)
    model, plain = twins(config, seed=4)
    backend = model.batcher.runner.plan.backend = Watching(shared_attention)
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompt = [(i * i * 5 + i) % 57 + 2 for i in range(200)]
    seqs = [Sequence([*prompt, 3 + i, 9], sampling, seed=0) for i in range(6)]
    await asyncio.gather(*(model.decode(seq) for seq in seqs))
    for seq in seqs:
        answer = seq.tokens[202:]
        assert len(answer) == 40
        for token, scores in zip(answer, plain.scores(seq.tokens[:202], answer, sampling, 0), strict=True):
            assert_best(token, scores)
        model.release(seq)
    whole = 192 if shared_attention else 0  # of the 200 tokens those in whole blocks
    decoding = [(layout, step) for layout, step in backend.steps if layout.num_tokens == layout.num_sequences == 6]
    assert len(decoding) > 6
    for layout, step in decoding:
        keys = whole + int((layout.lengths - whole).sum())
        assert step.keys_read == keys * 2 * 2  # layers and heads
    await model.close()
