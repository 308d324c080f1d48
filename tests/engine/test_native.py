"""The compiled CPU kernels against torch's operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from decoding.tree import DraftTree
from engine.attention.layout import Layout, lay_out
from engine.attention.sdpa import SdpaStep
from engine.attention.step import Scores
from engine.backends.native.attention import NativeStep
from engine.backends.native.library import panel_columns
from engine.backends.native.weights import PackedMatrix, interleaved, native_linear
from engine.cache.paged_kv import PagedKV
from tests.engine.families import sinks_of
from tests.engine.kernel_builds import every_build as every_build
from tests.properties import cases

CPU = torch.device("cpu")
BLOCK = 4


def threads(count: int) -> Any:
    """A context in which kernels use so many threads."""

    class Threads:
        def __enter__(self) -> None:
            self.before = torch.get_num_threads()
            torch.set_num_threads(count)

        def __exit__(self, *_: object) -> None:
            torch.set_num_threads(self.before)

    return Threads()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@given(
    rows=st.integers(1, 40) | st.integers(230, 260),
    half_width=st.integers(1, 70),
    columns=st.integers(1, 100),
    biased=st.booleans(),
    seed=st.integers(0, 1000),
)
@cases(25)
def test_products_equal_torch(
    dtype: torch.dtype, num_threads: int, rows: int, half_width: int, columns: int, biased: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    a, weight = torch.randn(rows, 2 * half_width).to(dtype), torch.randn(columns, 2 * half_width).to(dtype)
    bias = torch.randn(columns).to(dtype) if biased else None
    expected = a.double() @ weight.double().T + (0 if bias is None else bias.double())
    with threads(num_threads):
        got = PackedMatrix(weight, bias)(a, wide=True)
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-5)


def test_many_rows_sum_as_few_do() -> None:
    """Many rows of bfloat16 are made float first where no instruction multiplies it; the order of sums stays."""
    torch.manual_seed(0)
    matrix, rows = PackedMatrix(torch.randn(70, 198).bfloat16()), torch.randn(156, 198).bfloat16()
    together, apart = matrix(rows, wide=True), [matrix(few, wide=True) for few in rows.split(6)]
    assert torch.equal(together, torch.cat(apart))


def test_a_native_linear_rounds_to_its_dtype() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 33).to(torch.bfloat16)
    hidden = torch.randn(2, 5, 64).to(torch.bfloat16)
    with torch.inference_mode():
        expected = linear.double()(hidden.double())
        got = native_linear(linear.to(torch.bfloat16))(hidden)
    assert got.shape == (2, 5, 33)
    torch.testing.assert_close(got.double(), expected, atol=0, rtol=2**-8)


def test_gates_and_what_they_gate_share_panels() -> None:
    half = panel_columns() // 2
    gate = torch.arange(half + 4.0)[:, None]
    mixed = interleaved(gate, 100 + gate)[:, 0].view(-1, half).tolist()
    rest, padding = [half + i for i in range(4)], [0] * (half - 4)
    assert mixed[0] == list(range(half))
    assert mixed[1] == [100 + i for i in range(half)]
    assert mixed[2] == rest + padding
    assert mixed[3] == [100 + i for i in rest] + padding


@st.composite
def batches(draw: st.DrawFn) -> tuple[Layout, int]:
    """A ragged batch over shuffled blocks, some of it trees; and how many slots the cache has."""
    sizes = draw(st.lists(st.tuples(st.integers(0, 150), st.integers(1, 70)), min_size=1, max_size=5))
    free = list(range(sum(-(-(cached + fed) // BLOCK) for cached, fed in sizes)))
    draw(st.randoms(use_true_random=False)).shuffle(free)
    trees, tables = {}, []
    for index, (cached, fed) in enumerate(sizes):
        needed = -(-(cached + fed) // BLOCK)
        tables.append(np.array([free.pop() for _ in range(needed)], dtype=np.int32))
        if fed > 1 and draw(st.booleans()):
            nodes = draw(st.integers(1, fed - 1))
            parents = tuple(draw(st.integers(-1, node - 1)) for node in range(nodes))
            tree = DraftTree((0,) * nodes, parents, "m")
            trees[index] = (tree.ancestor_mask(), tree.depths())
    cached, fed = [c for c, _ in sizes], [f for _, f in sizes]
    return lay_out([0] * sum(fed), fed, cached, tables, BLOCK, trees), sum(len(t) for t in tables) * BLOCK


def attended(layout: Layout, slots: int, shape: tuple[int, int, int], scores: Scores, dtype: torch.dtype) -> Any:
    """What both implementations make of the same random numbers; keys and values of the batch are written too."""
    heads, kv_heads, dim = shape
    torch.manual_seed(1)
    query = torch.randn(layout.num_tokens, heads, dim).to(dtype)
    pairs = torch.randn(layout.num_tokens, 2, kv_heads, dim).to(dtype)
    cache = torch.randn(slots, 2, kv_heads, dim).to(dtype)
    results = []
    for step in (NativeStep, SdpaStep):
        store = PagedKV(1, slots, kv_heads, dim, dtype, CPU)
        store.layers[0].copy_(cache)
        results.append(step(layout, store).attend(0, query, pairs, scores).float())
    return results


@pytest.mark.parametrize("shape", [(4, 2, 8), (3, 3, 20), (8, 1, 64), (70, 1, 4), (2, 2, 96)])
@given(
    batch=batches(),
    window=st.none() | st.integers(1, 90),
    chunked=st.booleans(),
    softcap=st.none() | st.just(5.0),
    sinks=st.booleans(),
    num_threads=st.integers(1, 3),
)
@cases(25)
def test_attention_equals_torch_for_any_ragged_batch(
    shape: tuple[int, int, int],
    batch: tuple[Layout, int],
    window: int | None,
    chunked: bool,
    softcap: float | None,
    sinks: bool,
    num_threads: int,
) -> None:
    layout, slots = batch
    bounds: dict[str, Any] = {"chunk" if chunked else "window": window}
    scores = Scores(0.3, softcap=softcap, sinks=sinks_of(shape[0]) if sinks else None, **bounds)
    with threads(num_threads):
        got, expected = attended(layout, slots, shape, scores, torch.float32)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


def test_heads_as_wide_as_latents_and_as_many_for_one_of_keys_equal_torch() -> None:
    tables = [np.arange(first, first + 12, dtype=np.int32) for first in (0, 12)]
    layout = lay_out([0] * 8, [7, 1], [30, 40], tables, BLOCK, {})
    got, expected = attended(layout, 24 * BLOCK, (128, 1, 576), Scores(576**-0.5), torch.float32)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


@given(batch=batches())
@cases(25)
def test_attention_in_bfloat16_is_within_rounding(batch: tuple[Layout, int]) -> None:
    layout, slots = batch
    got, expected = attended(layout, slots, (8, 2, 64), Scores(0.1), torch.bfloat16)
    torch.testing.assert_close(got, expected, atol=0.03, rtol=0)


@given(batch=batches())
@cases(10)
def test_a_wrong_tree_mask_would_be_seen(batch: tuple[Layout, int]) -> None:
    layout, slots = batch
    trees = {sequence: mask for sequence, mask in layout.trees.items() if len(mask) > 1}
    assume(trees)
    right, _ = attended(layout, slots, (4, 2, 8), Scores(0.3), torch.float32)
    sequence, mask = next(iter(trees.items()))
    mask[-1, 0] ^= True
    wrong, _ = attended(layout, slots, (4, 2, 8), Scores(0.3), torch.float32)
    row = int(layout.starts[sequence + 1]) - 1
    assert (right[row] - wrong[row]).abs().max() > 1e-3


def test_broken_numbers_of_one_sequence_reach_no_other() -> None:
    tables = [np.array([0, 1], dtype=np.int32), np.array([2], dtype=np.int32)]
    layout = lay_out([0, 0], [1, 1], [5, 1], tables, BLOCK, {})
    store = PagedKV(1, 12, 2, 8, torch.float32, CPU)
    store.layers[0].normal_()
    store.layers[0][10:] = float("nan")  # the second sequence's block, beyond its two tokens
    pairs = torch.randn(2, 2, 2, 8)
    out = NativeStep(layout, store).attend(0, torch.randn(2, 4, 8), pairs, Scores(0.3))
    assert out.isfinite().all()
