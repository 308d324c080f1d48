"""Attention over keys and values kept as bytes: the compiled kernels against torch over the numbers read back."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from engine.attention.grouped import GroupedStep
from engine.attention.layout import Layout
from engine.attention.prefixes import find_prefixes
from engine.attention.sdpa import SdpaStep
from engine.attention.step import Scores
from engine.backends.native.attention import NativeStep
from engine.backends.native.stack import NativeStack
from engine.cache.kv_formats import SCALE_BYTES, quantize
from engine.cache.paged_kv import PagedKV
from engine.forward_check import CHECK_CHUNKS, our_logits
from engine.loaded_model import LoadedModel
from engine.loading import prepare
from tests.engine.families import Family, Member, families, inputs, sinks_of
from tests.engine.kernel_builds import every_build as every_build
from tests.engine.layouts import CPU, Batch, batches, random_tree
from tests.properties import cases
from training.random_models import llama_config, random_model

SHAPES = [(4, 2, 8), (3, 3, 20), (6, 2, 6), (8, 1, 64), (70, 1, 4), (2, 2, 96), (4, 1, 130)]
ATOL = {torch.float32: 2e-5, torch.bfloat16: 0.03}


def store_of(cache: torch.Tensor, kv_dtype: Any = "int8") -> PagedKV:
    """One layer with this content."""
    slots, _, kv_heads, dim = cache.shape
    store = PagedKV(1, slots, kv_heads, dim, cache.dtype, CPU, kv_dtype)
    store.write(0, torch.arange(slots), cache)
    return store


def exact(layout: Layout, cache: torch.Tensor, query: torch.Tensor, pairs: torch.Tensor, scores: Scores) -> Any:
    """In float32, over the numbers that the bytes stand for."""
    kept, new = (store_of(each.float()).span(0, 0, len(each)) for each in (cache, pairs))
    return SdpaStep(layout, store_of(kept, "auto")).attend(0, query.float(), new, scores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@given(
    family=families(),
    softcap=st.none() | st.just(5.0),
    sinks=st.booleans(),
    shares=st.booleans(),
    large=st.sampled_from((1.0, 300.0)),
)
@cases(15)
def test_kernels_read_what_the_bytes_stand_for(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    family: Family,
    softcap: float | None,
    sinks: bool,
    shares: bool,
    large: float,
) -> None:
    query, pairs, cache = inputs(family, shape, dtype)
    pairs, cache = pairs.clone(), cache.clone()
    cache[::3, 1] *= large  # values of some tokens count in other steps than their neighbours
    scores = Scores(0.3, softcap=softcap, sinks=sinks_of(shape[0]) if sinks else None)
    prefixes = find_prefixes(family.layout(), 1, 1) if shares else None
    mine = NativeStep(family.layout(), store_of(cache), prefixes).attend(0, query, pairs, scores)
    expected = exact(family.layout(), cache, query, pairs, scores)
    torch.testing.assert_close(mine.float(), expected, atol=ATOL[dtype] * large, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(batch=batches(dims=(16, 22)), window=st.none() | st.integers(1, 90), chunked=st.booleans())
@cases(30)
def test_windows_chunks_and_trees_are_those_of_other_keys(
    dtype: torch.dtype, batch: Batch, window: int | None, chunked: bool
) -> None:
    bounds: dict[str, Any] = {"chunk" if chunked else "window": window}
    query, pairs = batch.inputs(dtype)
    cache, scores = batch.store(dtype).layers[0], Scores(0.3, **bounds)
    mine = NativeStep(batch.layout(), store_of(cache)).attend(0, query, pairs, scores)
    expected = exact(batch.layout(), cache, query, pairs, scores)
    torch.testing.assert_close(mine.float(), expected, atol=ATOL[dtype], rtol=0)


@given(family=families())
@cases(20)
def test_torch_reads_shared_prefixes_so_too(family: Family) -> None:
    found = find_prefixes(family.layout(), 1, 1)
    assume(found is not None)
    assert found is not None
    query, pairs, cache = inputs(family, (4, 2, 8), torch.float32)
    mine = GroupedStep(family.layout(), store_of(cache), found).attend(0, query, pairs, Scores(0.3))
    plain = SdpaStep(family.layout(), store_of(cache)).attend(0, query, pairs, Scores(0.3))
    torch.testing.assert_close(mine, plain, atol=1e-5, rtol=0)
    torch.testing.assert_close(plain, exact(family.layout(), cache, query, pairs, Scores(0.3)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("half", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("step", [NativeStep, SdpaStep])
def test_one_wrong_scale_would_be_seen(step: Any, half: int, dtype: torch.dtype) -> None:
    batch = Batch((5, 1), (60, 30), {0: random_tree(3, 1)}, dim=64, block_size=16)
    query, pairs = batch.inputs(dtype)
    cache, outs = batch.store(dtype).layers[0], []
    slot = int(batch.layout().blocks[0, 1]) * 16
    for factor in (1.0, 2.0):
        store = store_of(cache)
        store.layers[0][slot, half, :, -SCALE_BYTES:].view(torch.float32).mul_(factor)
        outs.append(step(batch.layout(), store).attend(0, query, pairs, Scores(0.3)).float())
    changed = (outs[0] - outs[1]).abs().amax((1, 2))
    assert changed[:5].max() > 2 * ATOL[dtype]
    assert torch.equal(outs[0][5], outs[1][5]), "the other sequence has no such key"


def store_after_a_forward(plan: LoadedModel) -> PagedKV:
    """Keys and values as the check's forward leaves them."""
    original, made = plan.cache, list[PagedKV]()

    def cache(*at: Any) -> PagedKV:
        made.append(original(*at))
        return made[-1]

    plan.cache = cache  # type: ignore[method-assign]  # nothing else gives the store away
    our_logits(plan, CHECK_CHUNKS, plan.vocab_size, CPU)
    return made[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [22, 64])
def test_the_stack_writes_the_bytes_that_torch_would(dtype: torch.dtype, dim: int) -> None:
    config = llama_config(head_dim=dim)
    plans = [prepare(random_model(deepcopy(config), 3, 0.2).to(dtype)).plan for _ in range(2)]
    assert all(isinstance(plan.stack, NativeStack) for plan in plans)
    plans[1].kv_dtype = "int8"
    stores = [store_after_a_forward(plan) for plan in plans]
    written = sum(CHECK_CHUNKS)
    # The keys and values of the first layer do not depend on attention.
    expected = quantize(stores[0].layers[0][:written])
    assert torch.equal(stores[1].layers[0][:written], expected)
    assert int(stores[1].layers[0][:written, ..., :-SCALE_BYTES].abs().amax(-1).min()) == 127


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("half", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("step", [NativeStep, SdpaStep])
def test_what_is_no_number_stays_none_and_reaches_no_other_sequence(
    step: Any, broken: float, half: int, dtype: torch.dtype
) -> None:
    batch = Batch((1, 1), (20, 20), dim=16, block_size=16)
    query, pairs = batch.inputs(dtype)
    pairs[0, half, 0, 3] = broken
    out = step(batch.layout(), store_of(batch.store(dtype).layers[0])).attend(0, query, pairs, Scores(0.3))
    assert out[0, :2].isnan().all()
    assert out[0, 2:].isfinite().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("half", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_no_number_of_a_prefix_reaches_those_who_read_it(
    softcap: float | None, half: int, kv_dtype: str, dtype: torch.dtype
) -> None:
    runs, members = ((-1, 20), (0, 9)), (Member(1, 3, 2), Member(1, 0, 1), Member(0, 2, 1), Member(-1, 9, 2))
    layout, scores = Family(runs, members).layout(), Scores(0.3, softcap=softcap)
    query, pairs, cache = inputs(Family(runs, members), (4, 2, 8), dtype)
    cache = cache.clone()
    cache[int(layout.blocks[0, 21]) * 4, half, 0, 3] = torch.nan
    expected = torch.zeros(query.shape, dtype=torch.bool)
    expected[:3, :2, slice(3, 4) if half and kv_dtype == "auto" else slice(None)] = True
    for prefixes in (None, find_prefixes(layout, 1, 1)):
        out = NativeStep(layout, store_of(cache, kv_dtype), prefixes).attend(0, query, pairs, scores)
        assert torch.equal(out.isnan(), expected)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_row_that_reads_nothing_but_no_numbers_is_none(broken: float, kv_dtype: str) -> None:
    batch = Batch((1,), (70,), dim=16, block_size=16)
    query, pairs = batch.inputs()
    cache, scores = batch.store().layers[0], Scores(0.3, window=7, sinks=sinks_of(4))  # the window begins at key 64
    query.abs_(), pairs[:, 0].fill_(broken), cache[:, 0].fill_(broken)
    for step in (NativeStep, SdpaStep):
        out = step(batch.layout(), store_of(cache, kv_dtype)).attend(0, query, pairs, scores)
        assert out.isnan().all()
