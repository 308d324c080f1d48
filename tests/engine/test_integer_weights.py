"""Weights of 4 and 8 bits: kernels against the numbers that integers stand for, and models that keep them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoding.sequence import Sequence
from engine.backends.native.weights import STEPS, IntegerMatrix, keeps, native_linear
from engine.costs.limits import predict_memory
from engine.device import Device
from engine.loading import load_checkpoint
from engine.model import EngineModel
from engine.quantized.awq import Awq
from engine.quantized.compressed_tensors import CompressedTensors
from engine.quantized.gptq import Gptq
from engine.quantized.integers import IntegerWeight, rounded, stored
from tests.engine.harness import CPU
from tests.engine.kernel_builds import every_build as every_build
from tests.engine.test_quantized import CASES, awq, gptq, pack_quantized, write_quantized
from tests.properties import cases
from training.random_models import byte_tokenizer, llama_config, random_model
from turnout.config import EngineConfig, ModelConfig
from turnout.errors import TurnoutError
from turnout.types import SamplingParams

OFFSETS = ("none", "zeros", "minimums")


def random_integers(columns: int, width: int, bits: int, group: int, offset: str) -> IntegerWeight:
    shape = (columns, -(-width // group))
    small = torch.randint(0, 1 << bits, (columns, width), dtype=torch.uint8) if bits < 8 else None
    return IntegerWeight(
        torch.randint(-128, 128, (columns, width)).to(torch.int8) if small is None else small,
        torch.rand(shape).half(),
        torch.randint(0, 17, shape).half() if offset == "zeros" else None,
        torch.randn(shape).half() if offset == "minimums" else None,
        group,
        small_bits=min(bits, 6),
    )


def to_bytes(rows: torch.Tensor, group: int) -> torch.Tensor:
    """Rows as the kernels round them, float64: 8 bits, and a scale for each group."""
    groups = torch.nn.functional.pad(rows.float(), (0, -rows.shape[1] % group)).view(len(rows), -1, group)
    most = groups.abs().amax(dim=2, keepdim=True)
    near = torch.where(most > 0, (groups * (torch.tensor(127.0) / most)).round(), 0)
    return (near.double() * (most / 127).double()).view(len(rows), -1)[:, : rows.shape[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(
    rows=st.integers(1, 20),
    half_width=st.integers(1, 150),
    columns=st.integers(1, 70),
    sizes=st.sampled_from([(bits, group) for bits, step in STEPS.items() for group in {step, 32, 64, 128}]),
    offset=st.sampled_from(OFFSETS),
    biased=st.booleans(),
    ordered=st.booleans(),
    seed=st.integers(0, 1000),
)
@cases(25)
def test_products_are_those_of_the_numbers_and_of_each_row_alone(
    dtype: torch.dtype,
    rows: int,
    half_width: int,
    columns: int,
    sizes: tuple[int, int],
    offset: str,
    biased: bool,
    ordered: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    weight = random_integers(columns, 2 * half_width, *sizes, offset)
    weight = replace(weight, order=torch.randperm(2 * half_width).int()) if ordered else weight
    check_products(weight, dtype, rows, torch.randn(columns) if biased else None)


# Of Q4_K, Q5_K, Q6_K and Q3_K, Q2_K, IQ4_XS; and one more.
SUPER_BLOCKS = (
    (4, 32, "minimums"),
    (5, 32, "minimums"),
    (6, 16, "none"),
    (6, 16, "minimums"),
    (8, 32, "none"),
    (4, 32, "none"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(
    rows=st.integers(1, 20),
    blocks=st.integers(1, 3),
    columns=st.integers(1, 70),
    kind=st.sampled_from(SUPER_BLOCKS),
    seed=st.integers(0, 1000),
)
@cases(25)
def test_products_with_super_blocks_are_too(
    dtype: torch.dtype, rows: int, blocks: int, columns: int, kind: tuple[int, int, str], seed: int
) -> None:
    torch.manual_seed(seed)
    check_products(random_super_blocks(columns, 256 * blocks, *kind), dtype, rows, None)


def random_super_blocks(columns: int, width: int, bits: int, group: int, offset: str) -> IntegerWeight:
    made = random_integers(columns, width, bits, group, offset)
    with_minimums = offset == "minimums"
    return replace(
        made,
        scales=torch.randint(-128, 128, made.scales.shape).to(torch.int8),
        minimums=torch.randint(0, 64, made.scales.shape).to(torch.int8) if with_minimums else None,
        blocks=torch.randn(columns, width // 256, 1 + with_minimums).half(),
    )


def check_products(weight: IntegerWeight, dtype: torch.dtype, rows: int, bias: torch.Tensor | None) -> None:
    (columns, width), group = weight.codes.shape, weight.group
    hidden = torch.randn(rows, width).to(dtype)
    hidden[0, ::3] = 0
    matrix = IntegerMatrix(weight, bias, dtype)
    got = matrix(hidden, wide=True)
    order = slice(None) if weight.order is None else weight.order.long()
    inputs, numbers = to_bytes(hidden[:, order], group), weight.dense()[:, order].double()
    expected = inputs @ numbers.T + (0 if bias is None else bias.double())
    size = (inputs.abs() @ numbers.abs().T).max()
    assert (got.double() - expected).abs().max() <= 3e-5 * size + 1e-6
    alone = torch.cat([matrix(row[None], wide=True) for row in hidden])
    assert torch.equal(got, alone)
    some = torch.randint(columns, (3,))
    assert torch.equal(matrix.part(some)(hidden, wide=True), got[:, some])


def test_rows_of_nothing_and_the_largest_integers_do_not_overflow() -> None:
    for bits, code in ((4, 15), (5, 31), (6, 63), (8, -128)):
        codes = torch.full((5, 128), code, dtype=torch.uint8 if bits < 8 else torch.int8)
        weight = IntegerWeight(codes, torch.ones(5, 1).half(), group=128, small_bits=min(bits, 6))
        hidden = torch.stack([torch.zeros(128), torch.full((128,), -3.0), torch.full((128,), 3.0)])
        got = IntegerMatrix(weight, None, torch.float32)(hidden)
        value = code if bits == 8 else code - (1 << (bits - 1))
        torch.testing.assert_close(got, torch.tensor([[0.0], [-384.0 * value], [384.0 * value]]).expand(3, 5))


@pytest.mark.parametrize(("bits", "most"), [(8, 0.01), (4, 0.09)])
def test_rounding_is_close_and_of_weights_that_are_alike_exact(bits: Any, most: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, 90)
    made = rounded(weight, bits).dense()
    assert made.shape == weight.shape
    assert (made - weight).norm() <= most * weight.norm()
    same = torch.full((2, 40), 0.5)
    torch.testing.assert_close(rounded(same, bits).dense(), same, rtol=1e-3, atol=0)


def test_a_layer_keeps_its_integers_and_rounds_to_its_dtype() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 33, dtype=torch.bfloat16)
    linear.integers = rounded(linear.weight, 8)  # type: ignore[assignment]
    hidden = torch.randn(2, 5, 64).bfloat16()
    with torch.inference_mode():
        got = native_linear(linear)(hidden)
        expected = linear.double()(hidden.double())
    assert got.dtype == torch.bfloat16
    assert (got.double() - expected).norm() <= 0.02 * expected.norm()


def stored_of(case: str, folder: Path) -> list[tuple[IntegerWeight | None, torch.Tensor]]:
    """Integers of a checkpoint's layers, and the weights they stand for."""
    from engine.quantized.loading import made_weights

    model = write_quantized(folder, CASES[case])
    with made_weights(folder, torch.float32, "model") as state:
        assert state is not None
        return [
            (state[f"{name}.weight"].integers(), layer.weight)
            for name, layer in model.named_modules()
            if isinstance(layer, torch.nn.Linear) and name != "lm_head"
        ]


@pytest.mark.parametrize("case", [
    "gptq, 4 bits, groups", "gptq, 4 bits, by activation, second format", "gptq, 8 bits, one group", "awq",
    "int4, groups", "int4, groups, zeros", "int8, packed", "int8",
])  # fmt: skip
def test_stored_integers_stand_for_exactly_the_weights(case: str, tmp_path: Path) -> None:
    for integers, weight in stored_of(case, tmp_path):
        assert integers is not None
        assert torch.equal(integers.dense(), weight)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_groups_of_every_size_and_order_are_kept(group: int) -> None:
    of_groups = {"group_0": {"weights": {"num_bits": 4, "strategy": "group", "group_size": group}}}
    makers = (
        (Gptq, {"bits": 4, "group_size": group}, gptq(4, group, "gptq")),
        (Gptq, {"bits": 8, "group_size": group, "desc_act": True}, gptq(8, group, "gptq", shuffled=True)),
        (Awq, {"bits": 4, "group_size": group}, awq(group)),
        (CompressedTensors, {"config_groups": of_groups}, pack_quantized(4, group, zeros=True)),
        (CompressedTensors, {"config_groups": of_groups}, pack_quantized(4, group, shuffled=True)),
    )
    for kind, settings, make in makers:
        tensors, weight = make(24, 256)
        found = kind(settings, "config.json", "model")
        integers = found.integers(tensors)
        assert integers is not None
        assert keeps(integers)
        assert torch.equal(integers.dense(), weight)
        assert torch.equal(found.dense(tensors), weight)


def test_what_integers_cannot_hold_is_left_dense(tmp_path: Path) -> None:
    assert all(integers is None for integers, _ in stored_of("fp8, channel", tmp_path))


def test_groups_of_unlike_sizes_and_scales_of_more_than_float16_are_left_dense() -> None:
    codes, scales = torch.randint(0, 16, (3, 64)), torch.rand(3, 2).half()
    index = torch.tensor([0, 1] * 32)
    made = stored(codes, scales, None, 4, 32, index)
    assert made is not None
    assert torch.equal(made.dense(), codes * scales.float()[:, index])
    assert stored(codes, scales, None, 4, 32, index.clone().fill_(0)) is None
    assert stored(codes, scales, None, 4, 0, index + 1) is None
    assert stored(codes, scales.float() + 1e-6, None, 4, 32) is None
    assert stored(codes, torch.ones(3, 4).half(), None, 4, 32, index) is None


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    random_model(llama_config(num_hidden_layers=2), seed=1).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_a_model_of_integers_is_another_one_and_its_rows_do_not_depend_on_others(plain: Path) -> None:
    digests = {load_checkpoint(plain, torch.bfloat16, CPU).digest}
    for weights in ("int8", "int4"):
        found = load_checkpoint(plain, torch.bfloat16, CPU, weights=weights)  # type: ignore[arg-type]
        assert any("rounded to 8 bits" in note for note in found.notes)
        digests.add(found.digest)
        normed = torch.randn(11, found.plan.width).bfloat16()
        together = found.plan.logits(normed)
        assert torch.equal(together, torch.cat([found.plan.logits(row[None]) for row in normed]))
    assert len(digests) == 3


def test_greedy_answers_do_not_depend_on_the_batch(plain: Path) -> None:
    device, settings = Device("cpu"), ModelConfig(path="-", kv_memory_bytes=8 << 20)
    found = load_checkpoint(plain, torch.float32, CPU, weights="int4")
    model = EngineModel("m", found, settings, EngineConfig(), device)
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    async def answers(prompts: list[list[int]]) -> list[list[int]]:
        sequences = [Sequence(prompt, sampling, 0) for prompt in prompts]
        await asyncio.gather(*(model.decode(seq) for seq in sequences))
        for seq in sequences:
            model.release(seq)
        return [seq.tokens[len(prompt) :] for seq, prompt in zip(sequences, prompts, strict=True)]

    async def both() -> tuple[list[list[int]], list[list[int]]]:
        prompts = [list(range(7 * i + 3, 7 * i + 9 + i)) for i in range(9)]
        together = await answers(prompts)
        alone = [(await answers([prompt]))[0] for prompt in prompts]
        await model.close()
        return together, alone

    together, alone = asyncio.run(both())
    device.close()
    assert all(len(answer) == 8 for answer in together)
    assert together == alone


def test_stored_integers_are_kept_where_the_kernels_hold_them(tmp_path: Path) -> None:
    write_quantized(tmp_path, CASES["int4, groups, zeros"])
    found = load_checkpoint(tmp_path, torch.bfloat16, CPU, weights="stored")
    dense = load_checkpoint(tmp_path, torch.bfloat16, CPU)
    assert any("7 linear layers" in note for note in found.notes)
    assert found.digest != dense.digest
    assert found.num_parameters == dense.num_parameters


def test_combinations_that_cannot_be_are_refused_by_name(plain: Path) -> None:
    with pytest.raises(TurnoutError, match="no linear weight is stored as integers"):
        load_checkpoint(plain, torch.bfloat16, CPU, field="models.m.path", weights="stored")
    with pytest.raises(TurnoutError, match="compiled CPU kernels") as refused:
        load_checkpoint(plain, torch.bfloat16, CPU, "torch", field="models.m.path", weights="int4")
    assert refused.value.field == "models.m.weights"
    for other in ({"device": "cuda"}, {"tensor_parallel": 2}, {"dtype": "float16"}):
        with pytest.raises(ValueError, match="int8"):
            ModelConfig.model_validate({"path": "demo:small", "weights": "int8", **other})


def test_the_prediction_counts_integers(plain: Path) -> None:
    def held(weights: str) -> int:
        settings = ModelConfig.model_validate({"path": str(plain), "weights": weights})
        [needs] = predict_memory({"m": settings}, EngineConfig()).values()
        return needs[0].weights

    assert held("int4") < held("int8") < held("dense")
