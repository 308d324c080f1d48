"""Buckets, padding and replays of the CUDA path, without a GPU and without Triton."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import engine.backends.base
from decoding.partial_forward import LayerSelection
from engine.attention.layout import select
from engine.attention.sdpa import SdpaStep
from engine.attention.step import Scores
from engine.backends.base import choose_backend
from engine.backends.cuda.buckets import MAX_ROWS, WIDTH, Bucket, buckets
from engine.backends.cuda.graphs import ALL, MOST_PARTS, OFTEN, Frame, Graphs, Output, Part
from engine.backends.cuda.metadata import NOWHERE, Extent, Metadata
from engine.backends.cuda.paged_attention import LARGE_PROGRAMS, MIN_SPLIT_KEYS, PROGRAMS, Reach, tile
from engine.backends.cuda.paged_attention import MAX_ROWS as TILE_ROWS
from engine.backends.cuda.step import CudaStep, PagedStep
from tests.engine.layouts import Batch, batches, random_tree
from tests.engine.triton_process import Reruns
from tests.properties import cases
from turnout.errors import TurnoutError

CPU = torch.device("cpu")


def unpacked_mask(word: int, size: int) -> list[bool]:
    return [bool(word >> bit & 1) for bit in range(size)]


@cases(60)
@given(batch=batches(most_fed=64), extra=st.tuples(*[st.integers(0, 5)] * 3))
def test_packing_keeps_every_field_and_padding_belongs_to_nobody(batch: Batch, extra: tuple[int, int, int]) -> None:
    layout = batch.layout()
    exact = Extent.of(layout)
    extent = Extent(exact.rows + extra[0], exact.sequences + extra[1], exact.width + extra[2])
    metadata = Metadata.empty(extent, CPU)
    metadata.flat.fill_(7)  # what an earlier batch left there
    metadata.load(layout)
    rows, sequences, width = exact.rows, exact.sequences, exact.width
    for packed, own in (
        (metadata.tokens, layout.tokens),
        (metadata.positions, layout.positions),
        (metadata.slots, layout.slots),
        (metadata.starts, layout.starts),
        (metadata.lengths, layout.lengths),
    ):
        assert packed[: len(own)].tolist() == own.tolist()
    assert metadata.blocks[:sequences, :width].tolist() == layout.blocks.tolist()
    assert (metadata.slots[rows:] == NOWHERE).all()
    assert (metadata.starts[sequences:] == rows).all(), "a padding sequence has no rows, and no sequence has padding"
    for rest in (metadata.tokens[rows:], metadata.positions[rows:], metadata.tree_masks[rows:]):
        assert not rest.any()
    assert not metadata.lengths[sequences:].any()
    assert not metadata.tree_sizes[sequences:].any()
    assert not metadata.blocks[sequences:].any()
    assert not metadata.blocks[:, width:].any()
    for sequence in range(sequences):
        start, end = layout.starts[sequence : sequence + 2].tolist()
        mask = layout.trees.get(sequence, torch.zeros(0, 0))
        size = len(mask)
        assert metadata.tree_sizes[sequence] == size
        assert not metadata.tree_masks[start : end - size].any()
        words = metadata.tree_masks[end - size : end].tolist()
        assert [unpacked_mask(word, size) for word in words] == mask.tolist()


def test_the_last_bit_of_a_mask_is_a_node_like_any_other() -> None:
    batch = Batch((64,), (3,), {0: tuple(range(-1, 63))})
    metadata = Metadata.empty(Extent.of(batch.layout()), CPU)
    metadata.load(batch.layout())
    assert metadata.tree_masks[-1] == -1  # all 64 bits
    assert metadata.tree_masks[-2] == 2**63 - 1


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (33, 64), (64, 64)])
def test_a_bucket_holds_at_most_twice_what_it_must(tokens: int, rows: int) -> None:
    single = Bucket.of(Batch((1,) * tokens, (5,) * tokens).layout())
    assert single == Bucket(rows, True, WIDTH)
    if tokens > 1:
        assert Bucket.of(Batch((tokens,), (5,)).layout()) == Bucket(rows, False, WIDTH)


def test_what_no_bucket_holds() -> None:
    assert Bucket.of(Batch((MAX_ROWS + 1,), (0,)).layout()) is None
    assert Bucket.of(Batch((1,) * (MAX_ROWS + 1), (0,) * (MAX_ROWS + 1)).layout()) is None


@pytest.mark.parametrize(("blocks", "width"), [(WIDTH, WIDTH), (WIDTH + 1, 4 * WIDTH), (4 * WIDTH + 1, 16 * WIDTH)])
def test_block_tables_grow_in_few_steps(blocks: int, width: int) -> None:
    assert Bucket.of(Batch((1,), (blocks - 1,), block_size=1).layout()) == Bucket(1, True, width)


@pytest.mark.parametrize("most_blocks", [1, WIDTH, WIDTH + 1, 5 * WIDTH])
def test_every_bucket_there_can_be_is_set_up_by_its_own_smallest_batch(most_blocks: int) -> None:
    size = 4
    mine = list(buckets(most_blocks))
    for bucket in mine:
        sequences, fed, blocks = bucket.smallest
        cached = (max((blocks - 1) * size + 1 - fed, 0), *(0,) * (sequences - 1))
        assert Bucket.of(Batch((fed,) * sequences, cached, block_size=size).layout()) == bucket
    longest = (most_blocks * size - 1,)
    assert {Bucket.of(Batch((1,), longest, block_size=size).layout())} <= set(mine)
    assert len(set(mine)) == len(mine) == 13 * len({bucket.width for bucket in mine})


@cases(60)
@given(batch=batches(most_fed=64))
def test_batches_launched_one_by_one_are_cut_as_in_their_graph(batch: Batch) -> None:
    layout, store = batch.layout(), batch.store()
    step, bucket = CudaStep(layout, store, 8), Bucket.of(layout)
    step.bucket = bucket
    launched = step.parts
    assert isinstance(launched, PagedStep)
    if bucket is not None:
        assert launched.reach == Frame(bucket, step, ANGLES, None).step.reach
    assert launched.reach.rows >= layout.num_tokens
    assert launched.reach.fed >= layout.counts.max()
    assert launched.reach.keys >= layout.lengths.max()


def layers(
    part: Part, tokens: torch.Tensor, states: torch.Tensor | None, angles: torch.Tensor, step: PagedStep
) -> Output:
    """In place of layers: each row's token, slot and angle, and the keys of all sequences, [rows, 4]; taps: states."""
    keys = step.metadata.lengths.sum().expand(len(tokens))
    hidden = torch.stack((tokens, step.metadata.slots, angles[:, 0, 0].long(), keys), dim=1)
    return hidden, {} if states is None else dict.fromkeys(part.taps, states)


def own_rows(batch: Batch) -> list[list[int]]:
    layout = batch.layout()
    keys = int(layout.lengths.sum())
    columns = (layout.tokens.tolist(), layout.slots.tolist(), layout.positions.tolist())
    return [[*row, keys] for row in zip(*columns, strict=True)]


ANGLES = torch.arange(400.0)[:, None, None].expand(400, 2, 8).contiguous()  # of a position: the position itself


def test_a_replay_computes_the_new_batch_and_nothing_of_the_one_before() -> None:
    recorder = Reruns()
    graphs, store = Graphs(layers, recorder), Batch((1,), (0,)).store()
    sizes = [(1,) * 8, (1,) * 5, (5,), (1, 2, 4), (1,) * 6, (2,), (8,), (1,)]
    for seed, counts in enumerate(sizes):
        batch = Batch(counts, tuple(range(7, 7 + len(counts))), seed=seed)
        bucket = Bucket.of(batch.layout())
        assert bucket is not None
        got, _ = graphs.run(bucket, ALL, CudaStep(batch.layout(), store, 1), ANGLES)
        assert got.tolist() == own_rows(batch)
    assert len(recorder.recorded) == 4  # singles of 8 and of 1, spans of 8 and of 2


def test_a_longer_table_of_angles_is_read_without_a_new_recording() -> None:
    recorder = Reruns()
    graphs, batch = Graphs(layers, recorder), Batch((1, 1), (300, 2))
    bucket = Bucket.of(batch.layout())
    assert bucket is not None
    step = CudaStep(batch.layout(), batch.store(), 1)
    for table in (ANGLES[:301], ANGLES.clone()):
        assert graphs.run(bucket, ALL, step, table)[0].tolist() == own_rows(batch)
    assert len(recorder.recorded) == 1


def test_another_cache_is_never_written_by_an_old_recording() -> None:
    recorder, seen = Reruns(), []

    def noting(
        part: Part, tokens: torch.Tensor, states: torch.Tensor | None, angles: torch.Tensor, step: PagedStep
    ) -> Output:
        seen.append(step.store)
        return layers(part, tokens, states, angles, step)

    graphs, batch = Graphs(noting, recorder), Batch((1,), (3,))
    bucket = Bucket.of(batch.layout())
    assert bucket is not None
    stores = [batch.store(), batch.store(), batch.store()]
    for store in stores:
        graphs.run(bucket, ALL, CudaStep(batch.layout(), store, 1), ANGLES)
        assert seen[-1] is store
    assert len(recorder.recorded) == 3


def skipping(layer: int) -> Part:
    return Part(LayerSelection(skipped=frozenset({layer})))


def test_a_part_is_recorded_once_it_runs_often_and_all_layers_at_once() -> None:
    bucket = Bucket(1, True, WIDTH)
    graphs = Graphs(layers, Reruns())
    assert graphs.wants(bucket, ALL)
    assert [graphs.wants(bucket, skipping(0)) for _ in range(OFTEN)] == [False] * (OFTEN - 1) + [True]
    assert not graphs.wants(bucket, skipping(1))
    assert not graphs.wants(Bucket(2, True, WIDTH), skipping(0))


def test_the_parts_used_last_are_kept_and_the_rest_are_counted_anew() -> None:
    recorder, batch = Reruns(), Batch((1,), (3,))
    graphs, bucket = Graphs(layers, recorder), Bucket(1, True, WIDTH)
    step = CudaStep(batch.layout(), batch.store(), 1)
    for layer in range(MOST_PARTS):
        graphs.run(bucket, skipping(layer), step, ANGLES)
    graphs.run(bucket, skipping(0), step, ANGLES)
    graphs.run(bucket, skipping(MOST_PARTS), step, ANGLES)
    assert len(recorder.recorded) == MOST_PARTS + 1
    assert graphs.wants(bucket, skipping(0))
    assert graphs.wants(bucket, skipping(MOST_PARTS))
    assert not graphs.wants(bucket, skipping(1))


def test_parts_that_are_hardly_ever_run_are_forgotten() -> None:
    graphs, bucket = Graphs(layers, Reruns()), Bucket(1, True, WIDTH)
    for _ in range(OFTEN):
        for layer in range(3 * MOST_PARTS):
            assert not graphs.wants(bucket, skipping(layer))
    assert len(graphs._runs) <= 2 * MOST_PARTS


def test_states_go_into_the_first_layer_and_what_is_tapped_comes_out_in_their_rows() -> None:
    graphs, store = Graphs(layers, Reruns()), Batch((1,), (0,)).store()
    part = Part(LayerSelection(first=2), frozenset({2, 3}))
    for seed, counts in enumerate([(5,), (8,), (3, 4)]):
        batch = Batch(counts, (7,) * len(counts), seed=seed)
        bucket = Bucket.of(batch.layout())
        assert bucket is not None
        states = torch.rand(sum(counts), 6)
        hidden, taps = graphs.run(bucket, part, CudaStep(batch.layout(), store, 1), ANGLES, states)
        assert hidden.tolist() == own_rows(batch)
        assert taps.keys() == {2, 3}
        assert all(torch.equal(tapped, states) for tapped in taps.values())


@cases(100)
@given(
    sequences=st.integers(1, 128),
    fed=st.integers(1, 64),
    keys=st.integers(1, 200_000),
    kv_heads=st.integers(1, 32),
    group=st.integers(1, 16),
    processors=st.integers(1, 200),
    half=st.booleans(),
    window=st.none() | st.integers(1, 10_000),
)
def test_programs_cover_every_row_and_fill_the_device(
    sequences: int, fed: int, keys: int, kv_heads: int, group: int, processors: int, half: bool, window: int | None
) -> None:
    cache = torch.empty(1, 2, kv_heads, 64, dtype=torch.bfloat16 if half else torch.float32)
    rows = sequences * fed
    tiling = tile(Reach(rows, sequences, fed, keys), cache, group, processors, window)
    assert tiling.rows * tiling.row_tiles >= fed * group
    assert (tiling.rows & tiling.rows - 1, tiling.splits & tiling.splits - 1) == (0, 0)
    assert tiling.splits == 1 or min(keys, keys if window is None else window + fed) >= tiling.splits * MIN_SPLIT_KEYS
    most = (LARGE_PROGRAMS if tiling.rows == TILE_ROWS else PROGRAMS) * processors
    assert tiling.splits == 1 or max(sequences, rows * group // tiling.rows) * kv_heads * tiling.splits <= most


def test_one_long_sequence_is_cut_until_the_device_is_full() -> None:
    cache = torch.empty(1, 2, 8, 128, dtype=torch.bfloat16)
    assert tile(Reach(1, 1, 1, 32_768), cache, 4, 132, None).splits == 64
    assert tile(Reach(1, 1, 1, 32_768), cache, 4, 132, 1024).splits == 16
    assert tile(Reach(64, 64, 1, 32_768), cache, 4, 132, None).splits == 1


def test_part_of_a_batch_is_a_batch() -> None:
    batch = Batch((2, 70, 1, 5), (9, 0, 30, 4), {0: (-1, -1), 3: random_tree(4, 1)})
    whole = batch.layout()
    part, rows = select(whole, np.array([0, 3]))
    assert rows.tolist() == [0, 1, 73, 74, 75, 76, 77]
    assert part.starts.tolist() == [0, 2, 7]
    assert part.lengths.tolist() == [11, 9]
    assert part.slots.tolist() == whole.slots[rows].tolist()
    assert part.positions.tolist() == whole.positions[rows].tolist()
    assert part.blocks.tolist() == whole.blocks[[0, 3]].tolist()
    assert part.trees == {0: whole.trees[0], 1: whole.trees[3]}


def test_prompt_chunks_need_no_kernel_of_ours() -> None:
    batch = Batch((70, 65), (0, 9))
    scores = Scores(0.3, 30)
    stores = [batch.store(), batch.store()]
    expected = SdpaStep(batch.layout(), stores[0]).attend(0, *batch.inputs(), scores)
    got = CudaStep(batch.layout(), stores[1], 1).attend(0, *batch.inputs(), scores)
    assert torch.equal(got, expected)
    assert torch.equal(stores[1].layers[0], stores[0].layers[0])


@pytest.mark.parametrize(
    ("dim", "scores"),
    [(8, Scores(0.3, sinks=torch.linspace(-3.0, 9.0, 4))), (576, Scores(0.3)), (8, Scores(0.3, chunk=4))],
    ids=["sinks", "wide_heads", "chunks"],
)
def test_what_no_kernel_of_ours_computes_goes_to_torch(dim: int, scores: Scores) -> None:
    batch = Batch((1, 5), (3, 9), dim=dim)
    stores = [batch.store(), batch.store()]
    expected = SdpaStep(batch.layout(), stores[0]).attend(0, *batch.inputs(), scores)
    assert torch.equal(CudaStep(batch.layout(), stores[1], 1).attend(0, *batch.inputs(), scores), expected)


def test_a_tree_beyond_the_width_of_a_mask_goes_with_the_prompt_chunks() -> None:
    tree = random_tree(65, 7)
    batch = replace(Batch((65,), (9,)), trees={0: tree})
    stores = [batch.store(), batch.store()]
    expected = SdpaStep(batch.layout(), stores[0]).attend(0, *batch.inputs(), Scores(0.3))
    assert torch.equal(CudaStep(batch.layout(), stores[1], 1).attend(0, *batch.inputs(), Scores(0.3)), expected)


def test_without_triton_cuda_falls_back_to_torch_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine.backends.base, "find_spec", lambda name: None)
    engine.backends.base._say_once.cache_clear()
    with caplog.at_level(logging.WARNING, "engine.backends.base"):
        assert choose_backend("auto", torch.device("cuda")).name == "torch"
    assert "Triton is not installed" in caplog.text


def test_torch_stays_torch_and_compiled_cpu_kernels_stay_on_the_cpu() -> None:
    assert choose_backend("torch", torch.device("cuda")).name == "torch"
    with pytest.raises(TurnoutError, match=r"engine\.kernels|for the CPU"):
        choose_backend("native", torch.device("cuda"))


def test_importing_the_path_does_not_import_triton() -> None:
    """Triton decides at import whether it interprets; whoever imports this package must still have the choice."""
    probe = "import sys, engine.backends.base, engine.backends.cuda.backend; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", probe], check=True)


@pytest.mark.parametrize("wanted", [True, False])
def test_cuda_says_that_it_reads_shared_prefixes_once_a_sequence(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.backends.base, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=1))
    notes: list[str] = []
    assert choose_backend("auto", torch.device("cuda"), wanted, notes).name == "cuda"
    assert ["engine.shared_attention" in note for note in notes] == [True] * wanted
