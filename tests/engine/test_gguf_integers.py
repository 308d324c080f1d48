"""GGUF models whose weights stay as the file has them: exactly its numbers, every kind, and kinds that are mixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine.backends.native import stack, weights
from engine.backends.native.weights import IntegerMatrix, PackedMatrix, matrix_of, product_of
from engine.checkpoints import read_model
from engine.gguf_blocks import UNPACKED, integers_of
from engine.loading import Checkpoint, load_checkpoint
from engine.quantized.integers import rounded
from engine.quantized.loading import made_weights
from tests.engine.harness import CPU
from tests.engine.kernel_builds import every_build as every_build
from tests.gguf_models import converted, random_blocks, write_gguf
from training.random_models import llama_config, random_model
from turnout import gguf_files
from turnout.errors import TurnoutError
from turnout.gguf_files import described

SUPER = (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)  # which the `gguf` package cannot write
# As llama.cpp mixes them: half of the values and of what leads down in more bits, one matrix for both embeddings.
MIXED = {
    "blk.0.attn_v.weight": Kind.Q6_K,
    "blk.0.ffn_down.weight": Kind.Q6_K,
    "blk.1.ffn_up.weight": Kind.Q5_K,
    "attn_output.weight": Kind.Q5_K,
    "token_embd.weight": Kind.Q6_K,
    "norm.weight": Kind.F32,
    "weight": Kind.Q4_K,
}
# In place of them where 256 does not divide the width; and what is no integers.
OTHERS = {
    "attn_v.weight": Kind.Q8_0,
    "ffn_gate.weight": Kind.F16,
    "ffn_down.weight": Kind.Q5_1,
    "token_embd.weight": Kind.Q8_0,
    "norm.weight": Kind.F32,
    "weight": Kind.Q5_0,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_files, "_cache", lambda: tmp_path)


def written(folder: Path, kinds: dict[str, Kind], width: int) -> Path:
    """A described model of two layers whose tensors are of these kinds, by the first end of a name that fits."""
    torch.manual_seed(1)
    model = random_model(llama_config(hidden_size=width, intermediate_size=2 * width), seed=3, spread=0.05)
    tensors: dict[str, Any] = converted(model)
    for name, tensor in tensors.items():
        kind = next(kind for end, kind in kinds.items() if name.endswith(end))
        if kind in SUPER:
            tensors[name] = random_blocks(kind, *tensor.shape, scale=1e-4)
    return described(write_gguf(folder / "model.gguf", model, kinds, tensors=tensors))


@pytest.mark.parametrize("kind", UNPACKED)
def test_integers_stand_for_exactly_what_the_library_makes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr("engine.gguf_blocks.CHUNK", 2 * 512)  # of 5 rows two at once
    stored = random_blocks(Kind[kind], 5, 512)
    made = integers_of(stored.reshape(-1), kind, 5, 512)
    assert made is not None
    assert torch.equal(made.dense(), torch.tensor(gguf.dequantize(stored, Kind[kind])))


def test_super_blocks_by_hand() -> None:
    half = numpy.frombuffer(numpy.array([0.5, 0.25], numpy.float16).tobytes(), numpy.uint8)
    # Scales 1 to 8 and minimums 9 to 16 of 6 bits; then 40, the highest two bits of which lie elsewhere, for the last.
    sizes, leasts = [1, 2, 3, 4, 5, 6, 7, 40], [9, 10, 11, 12, 13, 14, 15, 48]
    packed = [scale | high >> 4 << 6 for scale, high in zip(sizes[:4], sizes[4:], strict=True)]
    packed += [least | high >> 4 << 6 for least, high in zip(leasts[:4], leasts[4:], strict=True)]
    packed += [scale & 15 | (least & 15) << 4 for scale, least in zip(sizes[4:], leasts[4:], strict=True)]
    codes = torch.arange(256) % 16
    pairs = codes.view(4, 2, 32)
    four = numpy.concatenate(
        [half, numpy.array(packed, numpy.uint8), (pairs[:, 0] | pairs[:, 1] << 4).byte().flatten()]
    )
    made = integers_of(four, "Q4_K", 1, 256)
    expected = [
        0.5 * scale * code - 0.25 * least
        for scale, least, row in zip(sizes, leasts, codes.view(8, 32).tolist(), strict=True)
        for code in row
    ]
    assert made is not None
    assert made.dense()[0].tolist() == expected
    assert made.num_bytes == 256 // 2 + 2 * 8 + 2 * 2


def test_rows_of_queries_come_in_the_order_of_the_weights(tmp_path: Path) -> None:
    with made_weights(written(tmp_path, MIXED, 256), torch.float32, "model") as state:
        assert state is not None
        kept = 0
        for name, lazy in state.items():
            if (integers := getattr(lazy, "integers", lambda: None)()) is not None:
                assert torch.equal(integers.dense(), lazy[...]), name
                kept += 1
        assert kept == 2 * 7 + 1
        assert state["model.layers.0.input_layernorm.weight"].integers() is None


def logits(found: Checkpoint) -> torch.Tensor:
    from engine.forward_check import CHECK_CHUNKS, our_logits

    return our_logits(found.plan, CHECK_CHUNKS, found.vocab_size, CPU)


@pytest.mark.parametrize(("kinds", "dtype"), [(MIXED, torch.bfloat16), (OTHERS, torch.float32)])
def test_a_file_of_mixed_kinds_stays_packed(kinds: dict[str, Kind], dtype: torch.dtype, tmp_path: Path) -> None:
    folder = written(tmp_path, kinds, 256 if kinds is MIXED else 96)
    found = load_checkpoint(folder, dtype, CPU, weights="stored")
    dense = load_checkpoint(folder, torch.float32, CPU)
    error = (logits(found) - logits(dense)).norm() / logits(dense).norm()
    assert error <= 0.03
    plan: Any = found.plan
    products = [each for layer in plan.stack._layers for each in (layer._qkv, layer._out, layer._gate_up, layer._down)]
    parts = [part for each in (*products, plan.stack._head) for part in getattr(each, "_parts", [each])]
    assert {part.columns for part in parts if isinstance(part, PackedMatrix)} == (set() if kinds is MIXED else {192})
    size = sum(4 * part._panels.numel() for part in parts if isinstance(part, IntegerMatrix))
    with made_weights(folder, dtype, "model") as state:
        assert state is not None
        stored = [lazy.integers() for name, lazy in state.items() if "norm" not in name]
    counted = sum(each.num_bytes for each in stored if each is not None)
    count = sum(each is not None for each in stored)
    assert counted <= size <= 1.1 * counted  # the last panel of a matrix is filled up
    note = next(note for note in found.notes if note.startswith("weights stored"))
    assert f"{count} linear layers take {counted / 2**20:,.1f} MiB" in note
    gates = "(model.layers.0.mlp.gate_proj, model.layers.1.mlp.gate_proj)"
    dense_ones = f"; {2 * 96 * 192:,} numbers of 2 others as {str(dtype)[6:]} {gates}"
    assert (dense_ones in note) == (kinds is OTHERS)


def test_several_weights_over_one_input_are_each_as_alone() -> None:
    torch.manual_seed(0)
    linears = [torch.nn.Linear(64, columns, bias) for columns, bias in ((48, True), (33, True), (5, False), (7, True))]
    for linear, bits in zip(linears, (4, 4, 8, None), strict=True):
        if bits is not None:
            linear.integers = rounded(linear.weight, bits)  # type: ignore[assignment, arg-type]
    for dtype in (torch.float32, torch.bfloat16):
        hidden = torch.randn(9, 64).to(dtype)
        for linear in linears:
            linear.weight.data = linear.weight.data.to(dtype)
        product = product_of(linears, dtype)
        assert product.columns == 93
        alone = [matrix_of([linear], dtype)(hidden, wide=True) for linear in linears]
        assert torch.equal(product(hidden, wide=True), torch.cat(alone, dim=1))
        assert torch.equal(product(hidden), torch.cat(alone, dim=1).to(dtype))


def test_gates_of_another_kind_are_computed_as_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path, {"norm.weight": Kind.F32, "weight": Kind.Q4_K}, 256)
    together = load_checkpoint(folder, torch.float32, CPU, weights="stored")

    def apart(linears: Any, dtype: torch.dtype, join: Any = None) -> Any:
        return weights.Products([matrix_of([linear], dtype) for linear in linears])

    monkeypatch.setattr(stack, "product_of", apart)
    assert torch.equal(logits(load_checkpoint(folder, torch.float32, CPU, weights="stored")), logits(together))


def test_a_cut_file_and_a_width_of_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, MIXED, 256)
    read_model(folder, torch.float32)
    file = tmp_path / "model.gguf"
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    with pytest.raises(TurnoutError, match=r"model\.gguf is cut off: it lacks .* bytes of its tensors"):
        described(file)
    kinds = {"blk.0.attn_v.weight": Kind.Q4_K}
    tensors = converted(random_model(llama_config(), seed=1))
    tensors["blk.0.attn_v.weight"] = random_blocks(Kind.Q4_K, 32, 256)
    file = write_gguf(tmp_path / "narrow.gguf", random_model(llama_config(), seed=1), kinds, tensors=tensors)
    narrow = file.read_bytes()
    shape = (256).to_bytes(8, "little") + (32).to_bytes(8, "little")
    assert narrow.count(shape) == 1
    file.write_bytes(narrow.replace(shape, (64).to_bytes(8, "little") + (128).to_bytes(8, "little")))
    with pytest.raises(TurnoutError, match=r"narrow\.gguf: blk\.0\.attn_v\.weight .* cannot be stored as Q4_K"):
        described(file)
