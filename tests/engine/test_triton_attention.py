"""The Triton kernels, interpreted on the CPU, equal torch's attention; and they compile for GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.sdpa import SdpaStep
from engine.attention.step import Scores
from engine.backends.cuda.paged_attention import KEYS, STAGES, WARPS
from tests.engine import triton_process as remote
from tests.engine.layouts import Batch, batches, random_tree
from tests.properties import cases

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed")

TOLERANCE = 1e-5
PLAIN = Scores(0.3)
RAGGED = Batch((1, 1, 5, 9, 3), (40, 0, 30, 7, 21), {2: random_tree(5, 1), 3: random_tree(6, 2)})
CHAINS = Batch((1, 6, 4), (21, 60, 0))


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[remote.Call]:
    with remote.triton_process(True, tmp_path_factory.mktemp("interpreted")) as call:
        yield call


def expected(batch: Batch, scores: Scores, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    store = batch.store(dtype)
    out = SdpaStep(batch.layout(), store).attend(0, *batch.inputs(dtype), scores)
    return out, store.layers[0]


def assert_equals_torch(call: remote.Call, batch: Batch, scores: Scores = PLAIN, processors: int = 1) -> None:
    out, cache = expected(batch, scores)
    got, written = call(remote.attend, batch.layout(), batch.store(), *batch.inputs(), scores, processors)
    torch.testing.assert_close(got, out, atol=TOLERANCE, rtol=0)
    assert torch.equal(written, cache)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(2, 2, 64), (4, 1, 80), (8, 1, 128), (8, 2, 96), (16, 2, 12), (3, 1, 16)]
)
def test_heads_of_every_shape(interpreted: remote.Call, heads: int, kv_heads: int, dim: int) -> None:
    assert_equals_torch(interpreted, replace(RAGGED, heads=heads, kv_heads=kv_heads, dim=dim))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 4, 17])
@pytest.mark.parametrize("batch", [RAGGED, CHAINS], ids=["trees", "chains"])
def test_windows_and_soft_caps(
    interpreted: remote.Call, batch: Batch, window: int | None, softcap: float | None
) -> None:
    assert_equals_torch(interpreted, batch, Scores(0.3, window, softcap))


def test_as_many_fed_tokens_as_a_mask_has_bits(interpreted: remote.Call) -> None:
    chain = tuple(range(-1, 63))
    batch = Batch((64, 64), (5, 0), {0: random_tree(64, 3), 1: chain}, heads=8, kv_heads=2)
    assert_equals_torch(interpreted, batch, Scores(0.3, 40, None))


@pytest.mark.parametrize("window", [None, 700])
def test_long_caches_in_parts(interpreted: remote.Call, window: int | None) -> None:
    """Sequences of very different lengths: parts of the short one are empty."""
    batch = Batch((1, 3, 1), (2100, 900, 0), {1: random_tree(3, 4)}, heads=2, kv_heads=1, block_size=16)
    assert_equals_torch(interpreted, batch, Scores(0.3, window, None), processors=64)


def test_prompt_chunks_beside_short_rows(interpreted: remote.Call) -> None:
    batch = Batch((1, 70, 5, 65), (30, 12, 8, 0), {2: random_tree(4, 5)})
    assert_equals_torch(interpreted, batch, Scores(0.3, 20, None))


@cases(20)
@given(
    batch=batches(),
    window=st.none() | st.integers(1, 90),
    softcap=st.none() | st.floats(0.5, 30.0),
    processors=st.sampled_from((1, 64)),
)
def test_any_batch(
    interpreted: remote.Call, batch: Batch, window: int | None, softcap: float | None, processors: int
) -> None:
    assert_equals_torch(interpreted, batch, Scores(0.3, window, softcap), processors)


def test_an_offset_moves_no_key_that_is_read(interpreted: remote.Call) -> None:
    out, cache = interpreted(remote.attend, RAGGED.layout(), RAGGED.store(), *RAGGED.inputs(), PLAIN, 1)
    moved = replace(RAGGED, offsets=(7, 0, 100, 3, 64)).layout()
    got, written = interpreted(remote.attend, moved, RAGGED.store(), *RAGGED.inputs(), PLAIN, 1)
    assert torch.equal(got, out)
    assert torch.equal(written, cache)


def test_half_precision_is_as_close_as_its_rounding(interpreted: remote.Call) -> None:
    dtype = torch.float16
    batch = replace(RAGGED, dim=64)
    exact, _ = expected(batch, PLAIN)
    layout, store = batch.layout(), batch.store(dtype)
    got, _ = interpreted(remote.attend, layout, store, *batch.inputs(dtype), PLAIN, 1)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), exact, atol=5e-3, rtol=0)


def test_padding_changes_nothing_and_is_written_nowhere(interpreted: remote.Call) -> None:
    """Rows of padding hold NaN: one that reached a slot or a sum would show."""
    out, cache = expected(RAGGED, PLAIN)
    got, written = interpreted(remote.attend_padded, RAGGED.layout(), RAGGED.store(), *RAGGED.inputs(), PLAIN, 32, 64)
    torch.testing.assert_close(got, out, atol=TOLERANCE, rtol=0)
    assert torch.equal(written, cache)


def test_queries_need_not_lie_together(interpreted: remote.Call) -> None:
    """Some layers hand over a slice of a wider row, others heads before rows."""
    query, pairs = RAGGED.inputs()
    wide = torch.cat((query, query), dim=1)[:, : RAGGED.heads]
    turned = query.transpose(0, 1).contiguous().transpose(0, 1)
    stretched = torch.cat((pairs, pairs), dim=1)[:, :2]
    out, _ = expected(RAGGED, PLAIN)
    for strided in (wide, turned):
        assert not strided.is_contiguous()
        got, _ = interpreted(remote.attend, RAGGED.layout(), RAGGED.store(), strided, stretched, PLAIN, 1)
        torch.testing.assert_close(got, out, atol=TOLERANCE, rtol=0)


def rows_that_differ(got: torch.Tensor, out: torch.Tensor) -> list[int]:
    return ((got - out).abs().amax((1, 2)) > 1e-3).nonzero()[:, 0].tolist()


def test_one_wrong_bit_of_a_mask_shows_in_its_row_alone(interpreted: remote.Call) -> None:
    out, _ = expected(RAGGED, PLAIN)
    layout = RAGGED.layout()
    first = int(layout.starts[4]) - 6  # the tree of sequence 3 is its last six rows
    for row, node in ((0, 5), (3, 0), (5, 5)):
        wrong = remote.flipped(layout, 3, row, node)
        got, _ = interpreted(remote.attend, wrong, RAGGED.store(), *RAGGED.inputs(), PLAIN, 1)
        assert rows_that_differ(got, out) == [first + row]


@pytest.mark.parametrize("wrong", [3, 5])
def test_a_window_that_is_off_by_one_shows_in_every_row_it_cuts(interpreted: remote.Call, wrong: int) -> None:
    out, _ = expected(CHAINS, Scores(0.3, 4))
    layout = CHAINS.layout()
    got, _ = interpreted(remote.attend, layout, CHAINS.store(), *CHAINS.inputs(), Scores(0.3, wrong), 1)
    cut = [row for row, position in enumerate(layout.positions) if position >= min(wrong, 4)]
    assert rows_that_differ(got, out) == cut


@pytest.mark.parametrize("name", ["llama", "llama_biased", "qwen3", "gemma2"])
def test_a_whole_model_through_padded_replays(interpreted: remote.Call, name: str) -> None:
    num_recorded = interpreted(remote.check_architecture, name)
    assert (num_recorded > 0) == (name != "gemma2")


@pytest.mark.parametrize(
    ("name", "changes"), [("llama", {}), ("qwen3", {}), ("mistral", {}), ("llama", {"hidden_act": "gelu"})], ids=str
)
def test_replayed_layers_equal_launched_ones(interpreted: remote.Call, name: str, changes: dict[str, Any]) -> None:
    """Replayed ones are fused, those launched one by one are not."""
    assert interpreted(remote.check_replays, name, changes) is None  # the other process asserts


POINTERS = dict.fromkeys(("positions", "starts", "lengths", "tree_sizes", "tree_masks", "blocks", "slots"), "*i64") | {
    "weight": "*fp32",
    "parts": "*fp32",
    "scaling": "fp32",
    "softcap": "fp32",
    "eps": "fp32",
}
SHAPE = {"KV_HEADS": 4, "GROUP": 4, "BLOCK_SIZE": 16}
DECODE = {"DIM": 128, "TILE_DIM": 128, "ROWS": 16, "KEYS": KEYS, "IS_SPLIT": False, "WINDOW": 0, "SOFTCAP": 0.0}
VERIFY = {"DIM": 80, "TILE_DIM": 128, "ROWS": 64, "KEYS": KEYS, "IS_SPLIT": True, "WINDOW": 512, "SOFTCAP": 30.0}
MERGE = {"HEADS": 16, "DIM": 80, "TILE_DIM": 128, "SPLITS": 64}
ROTATE = {"HEADS": 16, "KV_HEADS": 4, "DIM": 80, "TILE": 128, "NORMED": True}
# What a program may have on the smallest GPU this is meant for (sm_86), bytes.
SHARED = 99 << 10


def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path_factory: pytest.TempPathFactory) -> None:
    stored = ("query", "cache", "out", "pairs", "hidden", "added", "weight", "total", "normed", "qkv", "angles")
    half = dict.fromkeys((*stored, "query_norm", "key_norm", "gate_up"), "*bf16")
    attention = half | {"weight": "*fp32"}
    jobs: list[tuple[str, dict[str, str], dict[str, Any], int]] = [
        ("write_kernel", POINTERS | half, {"ROW": 1024, "TILE": 1024}, 80),
        ("attend_kernel", POINTERS | attention, SHAPE | DECODE, 80),
        ("attend_kernel", POINTERS | attention | {"out": "*fp32"}, SHAPE | VERIFY, 90),
        ("merge_kernel", POINTERS | attention, MERGE, 90),
        ("add_norm_kernel", POINTERS | half, {"WIDTH": 3072, "TILE": 4096, "ADDS": True}, 80),
        ("rotate_kernel", POINTERS | half, ROTATE, 80),
        ("gate_kernel", POINTERS | half, {"WIDTH": 8192, "TILE": 1024}, 90),
    ]
    with remote.triton_process(False, tmp_path_factory.mktemp("compiled")) as call:
        for name, *job in jobs:
            options = {"num_warps": WARPS, "num_stages": STAGES} if name == "attend_kernel" else {}
            assert call(remote.compile_kernel, name, *job, options) <= SHARED
