"""Index and position of a key are two things: an offset moves what rotates keys and queries, and not what is read."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from decoding.block import Block
from decoding.model import ReadSpec
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from engine.attention.grouped import GroupedStep
from engine.attention.layout import Layout
from engine.attention.prefixes import find_prefixes
from engine.attention.sdpa import SdpaStep
from engine.attention.step import Scores
from engine.backends.native.attention import NativeStep
from engine.cache.table import BlockTable
from engine.model import EngineModel
from engine.runner import Feed
from tests.engine.families import Family, families, inputs, store_of
from tests.engine.harness import Reference, twins
from tests.engine.layouts import Batch, batches
from tests.properties import cases
from training.random_models import llama_config
from turnout.types import SamplingParams

KV_HEADS = 2
TINY = llama_config(
    60, hidden_size=32, num_attention_heads=4, num_key_value_heads=KV_HEADS, num_hidden_layers=3, pad_token_id=0
)
PROMPT = [7, 3, 11, 5, 2, 9, 30, 8, 1, 4, 44, 17, 6, 52, 33, 21, 9, 9, 40]
KEPT = ([0, 1, 4, 9, 13, 16, 18], [0, 3, 5, 8, 15, 17, 18])  # of each head: as many, and not the same
TREE = DraftTree((20, 21, 22, 23, 24), (-1, -1, 0, 1, 1), "drafter")
LOGITS = ReadSpec(draw=None, logits=True)
SHAPE = (4, 2, 8)


@pytest.fixture(params=["native", "torch", "plain"])
def loaded(request: Any) -> tuple[EngineModel, Reference]:
    return twins(TINY, seed=4, kernels=request.param, block_size=4)


def table_of(model: EngineModel, cached: list[int], room: int, offset: int = 0) -> BlockTable:
    """A table with room for so many slots whose first ones are to hold these tokens."""
    table = BlockTable(Sequence(PROMPT, SamplingParams(), seed=0), model.pool, model.store)
    table.reserve(room)
    table.tokens.extend(cached)
    table.offset = offset
    return table


def read_all(model: EngineModel, tables: list[BlockTable], tokens: list[int], block: Block | None = None) -> Any:
    """Feed the same to all tables in one forward: logits of every row of each, [rows, vocab]."""
    fed = [*tokens, *(block.tokens if block is not None else ())]
    feeds = []
    for table in tables:
        reads = [(row, RowContext(table.seq), LOGITS) for row in range(len(fed))]
        feeds.append(Feed(table, fed, block, reads=reads))
    answer = model.batcher.runner.run(feeds)
    for table in tables:
        table.tokens.extend(tokens)
    return [torch.stack([row.logits for row in rows if row.logits is not None]) for rows in answer]


@torch.inference_mode()
def dense(plain: Reference, tokens: list[int], kept: tuple[list[int], ...]) -> torch.Tensor:
    """Logits after `tokens` and the tree, none of which sees a key of the prompt that its head does not keep."""
    mask, depths, start = TREE.ancestor_mask(), TREE.depths(), len(PROMPT) + len(tokens)
    ids = [*PROMPT, *tokens, *TREE.tokens]
    seen = torch.ones(4, len(ids), len(ids), dtype=torch.bool).tril()
    for head in range(4):
        dropped = sorted(set(range(len(PROMPT))) - set(kept[head * KV_HEADS // 4]))
        seen[head, len(PROMPT) :, dropped] = False
    seen[:, start:, start:] = mask
    positions = [*range(start), *(start + depth for depth in depths)]
    added = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
    logits: torch.Tensor = plain.model(
        torch.tensor([ids]), attention_mask=added[None], position_ids=torch.tensor([positions]), use_cache=False
    ).logits[0]
    return logits[len(PROMPT) :]


@pytest.mark.parametrize("kept", [KEPT, (list(range(len(PROMPT))),) * 2], ids=["some", "all"])
def test_kept_keys_are_a_dense_forward_with_a_mask(
    loaded: tuple[EngineModel, Reference], kept: tuple[list[int], ...]
) -> None:
    model, plain = loaded
    tokens, room = [50, 51, 8, 12, 13, 14], len(PROMPT) + 12
    whole = table_of(model, [], room)
    read_all(model, [whole], PROMPT)
    few = table_of(model, PROMPT[: len(kept[0])], room, len(PROMPT) - len(kept[0]))
    from_, to = np.asarray(whole.slots(0, len(PROMPT))), few.slots(0, len(kept[0]))
    for layer in model.store.layers:
        for head, places in enumerate(kept):
            layer[to, :, head] = layer[from_[places], :, head]
    # A chunk, single tokens, a tree: beside a sequence that keeps everything.
    parts = [read_all(model, [few, whole], tokens[:4]), *(read_all(model, [few, whole], [t]) for t in tokens[4:])]
    parts.append(read_all(model, [few, whole], [], Block.of_tree(TREE)))
    mine, others = (torch.cat([part[index] for part in parts]) for index in (0, 1))
    torch.testing.assert_close(mine, dense(plain, tokens, kept), atol=1e-4, rtol=0)
    torch.testing.assert_close(others, dense(plain, tokens, (list(range(len(PROMPT))),) * 2), atol=1e-4, rtol=0)


@pytest.mark.parametrize("offset", [1, 7])
def test_keys_are_rotated_for_their_positions(loaded: tuple[EngineModel, Reference], offset: int) -> None:
    """Below all attention, a key depends on nothing but its token and its position."""
    model, _ = loaded
    plain, moved = table_of(model, [], 20), table_of(model, [], 20, offset)
    read_all(model, [plain], [0] * offset + PROMPT[:5], Block.of_tree(TREE))
    read_all(model, [moved], PROMPT[:5], Block.of_tree(TREE))
    keys = model.store.layers[0][:, 0]
    there, here = keys[plain.slots(offset, 10)], keys[moved.slots(0, 10)]
    torch.testing.assert_close(here, there, atol=1e-5, rtol=0)
    assert (here - keys[plain.slots(0, 10)]).abs().max() > 1e-2


def moved(layout: Layout, seed: int) -> Layout:
    """The layout with an offset for each sequence."""
    offsets = np.random.default_rng(seed).integers(0, 100, layout.num_sequences)
    return replace(layout, positions=layout.positions + np.repeat(offsets, layout.counts), offsets=offsets)


@given(batch=batches())
@cases(30)
def test_an_offset_of_0_changes_nothing(batch: Batch) -> None:
    plain, zero = batch.layout(), replace(batch, offsets=(0,) * len(batch.counts)).layout()
    for each in fields(Layout):
        one, other = getattr(plain, each.name), getattr(zero, each.name)
        if isinstance(one, np.ndarray):
            assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes()), each.name
    expected: list[int] = []  # as if written down by hand
    for sequence, (count, cached) in enumerate(zip(batch.counts, batch.cached, strict=True)):
        parents = batch.trees.get(sequence, ())
        first = cached + count - len(parents)
        expected += [*range(cached, first)]
        nodes: list[int] = []
        for parent in parents:
            nodes.append(first if parent < 0 else nodes[parent] + 1)
        expected += nodes
    assert plain.positions.tolist() == expected == plain.places.tolist()


@given(batch=batches(), window=st.none() | st.integers(1, 90), seed=st.integers(0, 99))
@cases(40)
def test_an_offset_moves_positions_and_no_key_that_torch_reads(batch: Batch, window: int | None, seed: int) -> None:
    plain, offset = batch.layout(), moved(batch.layout(), seed)
    laid_out = replace(batch, offsets=tuple(offset.offsets.tolist())).layout()
    assert laid_out.positions.tolist() == offset.positions.tolist()
    assert laid_out.slots.tolist() == plain.slots.tolist()
    stores = batch.store(), batch.store()
    outs = [
        SdpaStep(layout, store).attend(0, *batch.inputs(), Scores(0.3, window))
        for layout, store in zip((plain, laid_out), stores, strict=True)
    ]
    assert torch.equal(*outs)
    assert torch.equal(stores[0].layers[0], stores[1].layers[0])


@pytest.mark.parametrize("step", [NativeStep, GroupedStep])
@given(family=families(), seed=st.integers(0, 99))
@cases(25)
def test_an_offset_moves_no_key_that_is_read_once_for_several(step: Any, family: Family, seed: int) -> None:
    found = find_prefixes(family.layout(), 1, 1)
    assume(found is not None)
    query, pairs, cache = inputs(family, SHAPE, torch.float32)
    layouts = family.layout(), moved(family.layout(), seed)
    assert torch.equal(*(step(each, store_of(cache), found).attend(0, query, pairs, Scores(0.3)) for each in layouts))


@given(batch=batches(), seed=st.integers(0, 99))
@cases(25)
def test_an_offset_moves_no_key_that_native_kernels_read(batch: Batch, seed: int) -> None:
    layouts = batch.layout(), moved(batch.layout(), seed)
    assert torch.equal(*(NativeStep(each, batch.store()).attend(0, *batch.inputs(), Scores(0.3)) for each in layouts))
