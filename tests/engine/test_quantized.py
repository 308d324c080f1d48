"""Weights of quantized checkpoints: words packed by hand, and models that equal those with the same weights set."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoints import read_config, read_model
from engine.costs.weight_sizes import weight_sizes
from engine.loading import load_checkpoint
from engine.quantized import FORMATS
from engine.quantized.base import LazyWeight, spread
from tests.engine.harness import CPU
from training.random_models import byte_tokenizer, llama_config, random_model
from turnout.checkpoint_files import READ_QUANTIZED, check_checkpoint
from turnout.errors import TurnoutError

Tensors = dict[str, torch.Tensor]
HIDDEN, WIDE = 64, 96
E4M3 = torch.float8_e4m3fn
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def packed(numbers: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Unsigned integers in words of 32 bits along `dim`, bit by bit in Python; `order`: the number in each place."""
    rows = (numbers if dim == 1 else numbers.T).tolist()
    each = 32 // bits
    places = order or range(each)
    words = []
    for row in rows:
        row += [0] * (-len(row) % each)
        lots = [row[start : start + each] for start in range(0, len(row), each)]
        words.append([sum(lot[number] << place * bits for place, number in enumerate(places)) for lot in lots])
    made = torch.tensor([[word - (1 << 32) if word >> 31 else word for word in row] for row in words])
    return (made if dim == 1 else made.T).to(torch.int32).contiguous()


def integers(shape: tuple[int, ...], low: int, high: int) -> torch.Tensor:
    return torch.randint(low, high, shape)


def scales(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return (torch.rand(shape) * 0.02 + 0.01).to(dtype)


def gptq(
    bits: int, group: int, version: str, shuffled: bool = False, indices: bool = True
) -> Callable[[int, int], tuple[Tensors, Any]]:
    def make(rows: int, columns: int) -> tuple[Tensors, torch.Tensor]:
        groups = -(-columns // group) if group > 0 else 1
        index = torch.arange(columns) // (group if group > 0 else columns)
        index = index[torch.randperm(columns)] if shuffled else index
        q, scale = integers((columns, rows), 0, 1 << bits), scales(groups, rows)
        first = 1 if version == "gptq" else 0
        zero = integers((groups, rows), first, 1 << bits)
        tensors = {"qweight": packed(q, bits, 0), "qzeros": packed(zero - first, bits, 1), "scales": scale}
        if indices and (shuffled or group > 0):
            tensors["g_idx"] = index.to(torch.int32)
        return tensors, ((q - zero[index]) * scale.float()[index]).T

    return make


def awq(group: int) -> Callable[[int, int], tuple[Tensors, Any]]:
    def make(rows: int, columns: int) -> tuple[Tensors, torch.Tensor]:
        groups = columns // group
        index = torch.arange(columns) // group
        q, zero, scale = integers((columns, rows), 0, 16), integers((groups, rows), 0, 16), scales(groups, rows)
        tensors = {"qweight": packed(q, 4, 1, AWQ_ORDER), "qzeros": packed(zero, 4, 1, AWQ_ORDER), "scales": scale}
        return tensors, ((q - zero[index]) * scale.float()[index]).T

    return make


def pack_quantized(
    bits: int, group: int, zeros: bool = False, shuffled: bool = False
) -> Callable[[int, int], tuple[Tensors, Any]]:
    def make(rows: int, columns: int) -> tuple[Tensors, torch.Tensor]:
        groups = columns // group if group > 0 else 1
        index = torch.arange(columns) // (columns // groups)
        index = index[torch.randperm(columns)] if shuffled else index
        half = 1 << (bits - 1)
        q, scale = integers((rows, columns), -half, half), scales(rows, groups, dtype=torch.bfloat16)
        zero = integers((rows, groups), -half, half) if zeros else torch.zeros(rows, groups, dtype=torch.int64)
        tensors = {
            "weight_packed": packed(q + half, bits, 1),
            "weight_scale": scale,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if zeros:
            tensors["weight_zero_point"] = packed(zero + half, bits, 0)
        if shuffled:
            tensors["weight_g_idx"] = index.to(torch.int32)
        return tensors, (q - zero[:, index]) * scale.float()[:, index]

    return make


def int8(rows: int, columns: int) -> tuple[Tensors, torch.Tensor]:
    q, scale, zero = integers((rows, columns), -128, 128), scales(rows, 1), integers((rows, 1), -128, 128)
    tensors = {"weight": q.to(torch.int8), "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    return tensors, (q - zero) * scale.float()


def float8(name: str, kind: str) -> Callable[[int, int], tuple[Tensors, Any]]:
    def make(rows: int, columns: int) -> tuple[Tensors, torch.Tensor]:
        weight = torch.randn(rows, columns).to(E4M3)
        if kind == "tensor":
            scale = spread = torch.rand(1) + 0.5
        elif kind == "channel":
            scale = spread = torch.rand(rows, 1) + 0.5
        else:  # blocks of 32 by 40, of which the last columns are cut off
            scale = torch.rand(-(-rows // 32), -(-columns // 40)) + 0.5
            spread = scale[torch.arange(rows) // 32][:, torch.arange(columns) // 40]
        return {"weight": weight, name: scale}, weight.float() * spread

    return make


@dataclass(frozen=True)
class Case:
    settings: dict[str, Any]
    make: Callable[[int, int], tuple[Tensors, Any]]
    notes: list[str] = field(default_factory=list)


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": {"weights": weights}}}


BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 40], "activation_scheme": "dynamic"}
CASES = {
    "gptq, 4 bits, groups": Case({"quant_method": "gptq", "bits": 4, "group_size": 32}, gptq(4, 32, "gptq")),
    "gptq, 4 bits, by activation, second format": Case(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "checkpoint_format": "gptq_v2"},
        gptq(4, 32, "gptq_v2", shuffled=True),
    ),
    "gptq, 8 bits, one group": Case({"quant_method": "gptq", "bits": 8, "group_size": -1}, gptq(8, -1, "gptq")),
    "gptq, cut-off group, without indices": Case(
        {"quant_method": "gptq", "bits": 4, "group_size": 40}, gptq(4, 40, "gptq", indices=False)
    ),
    "awq": Case({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, awq(32)),
    "int4, groups": Case(compressed("pack-quantized", num_bits=4), pack_quantized(4, 32)),
    "int4, groups, zeros": Case(compressed("pack-quantized", num_bits=4), pack_quantized(4, 32, zeros=True)),
    "int8, packed": Case(compressed("pack-quantized", num_bits=8), pack_quantized(8, -1)),
    "int8": Case(compressed("int-quantized", num_bits=8), int8),
    "fp8, tensor": Case(compressed("float-quantized"), float8("weight_scale", "tensor")),
    "fp8, channel": Case(compressed("float-quantized"), float8("weight_scale", "channel")),
    "fp8, block": Case(
        compressed("float-quantized", strategy="block", block_structure=[32, 40]), float8("weight_scale", "block")
    ),
    "fp8, block, named by a text": Case(
        compressed("float-quantized", strategy="block", block_structure="32x40"), float8("weight_scale", "block")
    ),
    "plain fp8, block": Case(
        BLOCKS,
        float8("weight_scale_inv", "block"),
        ["its activations are not quantized to fp8: they are computed in the model's dtype"],
    ),
    "plain fp8, tensor": Case({"quant_method": "fp8"}, float8("weight_scale_inv", "tensor")),
}


def write_quantized(folder: Path, case: Case) -> Any:
    """A folder whose linear layers are quantized, and the model with their weights set by hand."""
    torch.manual_seed(7)
    model = random_model(llama_config(hidden_size=HIDDEN, intermediate_size=WIDE, num_hidden_layers=1), seed=1)
    stored = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    for name, layer in model.model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            tensors, weight = case.make(*layer.weight.shape)
            del stored[f"model.{name}.weight"]
            stored |= {f"model.{name}.{part}": tensor for part, tensor in tensors.items()}
            layer.weight.data = weight.contiguous()
    byte_tokenizer().save_pretrained(folder)
    model.config.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": case.settings}))
    save_file(stored, folder / "model.safetensors")
    return model


@pytest.mark.parametrize("name", CASES)
def test_a_quantized_model_is_the_one_with_its_weights_set(name: str, tmp_path: Path) -> None:
    expected = write_quantized(tmp_path, CASES[name])
    check_checkpoint(tmp_path, "model")
    model, notes = read_model(tmp_path, torch.float32)
    assert notes == [f"{tmp_path}: {note}" for note in CASES[name].notes]
    for key, weight in expected.state_dict().items():
        assert torch.equal(model.state_dict()[key], weight), key
    tokens = torch.arange(5, 25)[None]
    with torch.inference_mode():
        assert torch.equal(model(tokens).logits, expected(tokens).logits)


def test_the_engine_runs_it_and_its_digest_names_the_weights(tmp_path: Path) -> None:
    """Loading compares the engine's forward with Hugging Face's on the same weights."""
    expected = write_quantized(tmp_path / "quantized", CASES["int4, groups, zeros"])
    expected.config.save_pretrained(tmp_path / "plain")
    save_file({k: v.contiguous() for k, v in expected.state_dict().items() if k != "lm_head.weight"},
              tmp_path / "plain/model.safetensors")  # fmt: skip
    found = [load_checkpoint(tmp_path / each, torch.bfloat16, CPU) for each in ("quantized", "plain")]
    assert found[0].digest == found[1].digest
    sizes = [weight_sizes(tmp_path / each, torch.bfloat16).num_parameters for each in ("quantized", "plain")]
    assert sizes == [each.num_parameters for each in found] == [found[0].num_parameters] * 2


def test_a_share_of_a_weight_does_not_keep_the_whole() -> None:
    lazy = LazyWeight((6, 4), torch.float32, lambda: torch.arange(24.0).view(6, 4), threading.Lock())
    assert lazy.get_shape() == [6, 4]
    assert lazy[...].tolist() == torch.arange(24.0).view(6, 4).tolist()
    share = lazy[2:4, 1:3]
    assert share.tolist() == [[9, 10], [13, 14]]
    assert share.untyped_storage().nbytes() == 4 * 4


HAND: dict[str, tuple[dict[str, Any], Tensors, list[list[float]]]] = {
    # 0x76543210: inputs 0 to 7 of the one output are 0 to 7; stored zero 2 stands for 3.
    "gptq": (
        {"bits": 4},
        {
            "qweight": torch.tensor([[0x76543210]] * 1, dtype=torch.int32).expand(1, 8).contiguous(),
            "qzeros": torch.tensor([[0x22222222]], dtype=torch.int32),
            "scales": torch.full((1, 8), 0.5),
        },
        [[-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0]] * 8,
    ),
    # 0x76543210: places hold outputs 0, 2, 4, 6, 1, 3, 5, 7, so that output 1 is 4; zeros are 4.
    "awq": (
        {},
        {
            "qweight": torch.tensor([[0x76543210]], dtype=torch.int32),
            "qzeros": torch.tensor([[0x44444444]], dtype=torch.int32),
            "scales": torch.full((1, 8), 2.0),
        },
        [[-8.0], [0.0], [-6.0], [2.0], [-4.0], [4.0], [-2.0], [6.0]],
    ),
    # 0x76543210: 0 to 7 less 8; of the ninth, 0xF less 8; zeros: row 0 has 0x9 - 8.
    "compressed-tensors": (
        {"config_groups": {"a": {"weights": {"num_bits": 4}}}},
        {
            "weight_packed": torch.tensor([[0x76543210, 0xF]], dtype=torch.int32),
            "weight_shape": torch.tensor([1, 9]),
            "weight_scale": torch.tensor([[1.0]]),
            "weight_zero_point": torch.tensor([[0x9]], dtype=torch.int32),
        },
        [[-9.0, -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, 6.0]],
    ),
    # Sign, four bits of exponent (bias 7), three of mantissa: 0x38 is 1, 0x39 is 1.125, 0xC0 is -2, 0x7E is 448.
    "fp8": (
        {"weight_block_size": [1, 3]},
        {
            "weight": torch.tensor([[0x38, 0x39, 0xC0, 0x7E]], dtype=torch.uint8).view(E4M3),
            "weight_scale_inv": torch.tensor([[2.0, 0.5]]),
        },
        [[2.0, 2.25, -4.0, 224.0]],
    ),
}


@pytest.mark.parametrize("method", HAND)
def test_words_unpacked_by_hand(method: str) -> None:
    settings, tensors, expected = HAND[method]
    assert FORMATS[method](settings, "config.json", "model").dense(tensors).tolist() == expected


def test_every_method_that_is_not_refused_has_a_file() -> None:
    assert set(FORMATS) == set(READ_QUANTIZED)


@pytest.mark.parametrize(
    ("blocks", "values", "columns"),
    [([], [1, 2], [1, 1, 2, 2]), ([[1, 3]], [1, 2], [1, 1, 1, 2]), ([[1, 9], [1, 3]], [1, 2], [1, 1, 1, 2])],
)
def test_factors_are_spread_over_their_blocks(blocks: list[list[int]], values: list[int], columns: list[int]) -> None:
    assert spread(torch.tensor([values]), (5, 4), blocks).tolist() == [columns]


def test_factors_of_no_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[1, 4\] factors do not fit a weight of \[5, 6\]"):
        spread(torch.ones(1, 4), (5, 6))


def test_a_weight_without_its_factors_is_refused(tmp_path: Path) -> None:
    write_quantized(tmp_path, CASES["plain fp8, block"])
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(TurnoutError, match=r"fp8 with model\.layers\.0\.mlp\.up_proj\.weight stored as F8_E4M3"):
        read_model(tmp_path, torch.float32)


def test_the_first_gptq_format_borrows_from_the_next_zero() -> None:
    """A zero of 0 is stored as 15, and takes one from its neighbour (`convert_gptq_v2_to_v1_format` of GPTQModel)."""
    zeros = torch.tensor([[0x43210 - 0x11111111]], dtype=torch.int32)
    tensors = {"qweight": torch.zeros(1, 8, dtype=torch.int32), "qzeros": zeros, "scales": torch.ones(1, 8)}
    dense = FORMATS["gptq"]({"bits": 4}, "config.json", "model").dense(tensors)
    assert dense[:, 0].tolist() == [-0.0, -1.0, -2.0, -3.0, -4.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"quant_method": "gptq", "bits": 3}, "gptq of bits 3 is not supported; supported: 2, 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "gptq of checkpoint_format 'marlin'"),
        ({"quant_method": "awq", "version": "gemv"}, "awq of version 'gemv' is not supported; supported: gemm"),
        ({"quant_method": "awq", "bits": 8}, "awq of bits 8 is not supported"),
        ({"quant_method": "awq", "zero_point": False}, "awq without zero_point is not supported"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 of fmt 'e5m2' is not supported"),
        (compressed("nvfp4-pack-quantized"), "compressed-tensors of format 'nvfp4-pack-quantized' is not supported"),
        (compressed("pack-quantized", num_bits=3), "compressed-tensors of num_bits 3 is not supported"),
        (
            compressed("dense") | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "compressed-tensors with sparsity_config is not supported",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": None}},
            "settings of compressed-tensors that cannot be used: 'NoneType' object has no attribute 'get'",
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes is not supported; supported: gptq, awq"),
    ],
)
def test_other_variants_are_refused_by_name(settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    llama_config(quantization_config=settings).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))
    with pytest.raises(TurnoutError, match=r"config\.json|quantization_config") as caught:
        read_config(tmp_path, "models.a.path")
    assert says in caught.value.message
    assert caught.value.field == "models.a.path"
    assert "\n" not in caught.value.message
