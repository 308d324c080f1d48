from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.base import ChunkShape
from kvstore.codecs._packing import WIDTHS, pack, packed_bytes, unpack
from kvstore.codecs.adaquant import PRESETS, AdaQuantCodec, choose_widths, quantise
from kvstore.codecs.base import load_codec
from tests.kvstore.profiled import alike_kv, alike_profiles, demo_kv, shape_of
from tests.properties import cases
from training.kv_profiles import Shapes

NAMES = ("adaquant", *PRESETS)


def round_trip(codec: AdaQuantCodec, kv: torch.Tensor, shape: ChunkShape) -> torch.Tensor:
    payload = codec.encode(kv, shape)
    assert payload.nbytes == codec.max_bytes(shape)
    out = torch.full(shape.size, torch.nan, dtype=shape.dtype)
    codec.decode(memoryview(bytearray(payload)), shape, out)
    return out


@pytest.mark.parametrize("bits", WIDTHS)
def test_codes_are_packed_without_a_gap(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (8 * 37,), generator=torch.Generator().manual_seed(bits)).to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.nbytes == packed_bytes(len(codes), bits) == 37 * bits
    assert torch.equal(unpack(packed, len(codes), bits), codes)


def test_the_hand_worked_group() -> None:
    codes, scales = quantise(torch.tensor([[0.0, 1.0, 2.0, 9.0]]), 2)
    assert codes.tolist() == [[0, 0, 1, 3]]
    assert scales.tolist() == [[3.0, 0.0]]
    assert (codes.float() * scales[:, :1] + scales[:, 1:]).tolist() == [[0.0, 0.0, 3.0, 9.0]]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("tokens", [16, 64, 128])
def test_bytes_are_the_bits_and_the_scales(name: str, tokens: int) -> None:
    shape = ChunkShape(0, 3, tokens, 2, 32, torch.bfloat16)
    num = tokens * 2 * 32
    expected = num * sum(PRESETS[name]) // 8 + 2 * (num // 64) * 4
    assert AdaQuantCodec(name).max_bytes(shape) == 3 * (expected + 2)


@cases(40)
@given(
    name=st.sampled_from(NAMES),
    layers=st.integers(1, 3),
    tokens=st.integers(1, 70),
    heads=st.integers(1, 3),
    width=st.integers(1, 12),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_an_error_is_at_most_half_a_step_of_its_group(
    name: str, layers: int, tokens: int, heads: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    size = (layers, tokens, 2, heads, width)
    kv = (torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)
    shape, codec = shape_of(kv, first_layer=4), AdaQuantCodec(name)
    out = round_trip(codec, kv, shape).float()
    # the widest group may be the whole side of a layer
    for side, bits in enumerate(codec.widths(0)):
        whole, back = kv[:, :, side].float(), out[:, :, side]
        span = whole.amax(dim=(1, 2, 3)) - whole.amin(dim=(1, 2, 3))
        rounding = 0.01 * whole.abs().amax(dim=(1, 2, 3))
        assert ((whole - back).abs().amax(dim=(1, 2, 3)) <= span / ((1 << bits) - 1) / 2 * 1.01 + rounding).all()


@pytest.mark.parametrize("value", [0.0, -2.5, 1e-7, 60000.0])
def test_equal_elements_stay_as_they_are(value: float) -> None:
    kv = torch.full((1, 64, 2, 1, 4), value).to(torch.bfloat16)
    assert torch.allclose(round_trip(AdaQuantCodec("adaquant"), kv, shape_of(kv)), kv, atol=1e-7)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, -70000.0])
def test_what_float16_cannot_hold_is_refused(value: float) -> None:
    kv = torch.zeros((1, 64, 2, 1, 4))
    kv[0, 3, 1, 0, 2] = value
    with pytest.raises(ValueError, match="finite"):
        AdaQuantCodec("adaquant").encode(kv, shape_of(kv))


def test_an_outlier_costs_precision_only_in_its_own_group() -> None:
    kv = alike_kv(128, seed=1)
    shape, codec = shape_of(kv), AdaQuantCodec("adaquant-k4v2")
    before = round_trip(codec, kv, shape)
    kv[1, 70, 0, 1, 3] = 500.0  # a key: its channel's tokens from 64 on
    kv[1, 70, 1, 1, 3] = 500.0  # a value: its token's 16 channels and those of the 3 tokens next to it
    changed = round_trip(codec, kv, shape) != before
    assert changed[1, 64:, 0, 1, 3].any()
    changed[1, 64:, 0, 1, 3] = False
    changed[1, 68:72, 1] = False
    assert not changed.any()


def test_the_side_with_the_larger_norm_gets_more_bits() -> None:
    assert choose_widths(8.0, 1.0) == (4, 2)
    assert choose_widths(1.0, 8.0) == (2, 4)
    assert choose_widths(1.0, 1.0) == (3, 3)
    # equal slopes: the sides' bits differ by the logarithm of their norms' ratio, and do so from a ratio of 2 on
    assert choose_widths(2.01, 1.0) == (4, 2)
    assert choose_widths(1.99, 1.0) == (3, 3)
    assert choose_widths(3.0, 1.0, budget=6.0) == (8, 4)
    assert choose_widths(100.0, 1.0, budget=2.6) == (3, 2)


def test_widths_follow_the_profile_layer_by_layer_and_travel_with_the_payload() -> None:
    profile = alike_profiles()["adaquant"]
    norms = profile.tensors["norms"].clone()
    norms[1] = norms[1].flip(0)
    swapped = replace(profile, tensors=profile.tensors | {"norms": norms})
    codec = AdaQuantCodec("adaquant", swapped)
    assert [codec.widths(layer) for layer in range(3)] == [(4, 2), (2, 4), (4, 2)]
    kv = alike_kv(64, seed=2)
    payload = codec.encode(kv, shape_of(kv))
    assert payload.nbytes == AdaQuantCodec("adaquant", profile).max_bytes(shape_of(kv))
    out, again = torch.empty_like(kv), torch.empty_like(kv)
    codec.decode(payload, shape_of(kv), out)
    AdaQuantCodec("adaquant", profile).decode(payload, shape_of(kv), again)
    assert torch.equal(out, again)
    errors = (out - kv).square().sum(dim=(1, 3, 4))
    assert (errors[1, 0] > 4 * errors[[0, 2], 0]).all()
    with pytest.raises(ValueError, match="3 layers"):
        codec.encode(kv, shape_of(kv, first_layer=1))


def test_without_a_profile_keys_get_four_bits_and_values_two() -> None:
    codec = load_codec("adaquant", {})
    assert isinstance(codec, AdaQuantCodec)
    assert codec.widths(17) == (4, 2)


def test_broken_payloads_are_refused() -> None:
    kv = alike_kv(64, seed=3)
    shape, codec = shape_of(kv), AdaQuantCodec("adaquant")
    payload = bytearray(codec.encode(kv, shape))
    out = torch.empty_like(kv)
    for broken in (payload[:-1], payload + b"\0", bytearray()):
        with pytest.raises(ValueError, match="bytes"):
            codec.decode(memoryview(broken), shape, out)
    for place, value, said in ((0, 5, "broken widths"), (0, 8, "another length"), (7, 0x7C, "broken scales")):
        broken = bytearray(payload)
        broken[place] = value
        with pytest.raises(ValueError, match=said):
            codec.decode(memoryview(broken), shape, out)


def test_norms_gathered_by_and_by_are_those_of_all_keys_and_values_at_once() -> None:
    shapes, read = Shapes(), demo_kv()[:20]
    for kv in read:
        shapes.add(kv)
    norms = shapes.norms()
    whole = torch.cat([kv.flatten(3).transpose(1, 2) for kv in read], 2).double()
    assert torch.allclose(norms["norms"].double(), whole.flatten(2).norm(dim=-1), rtol=1e-4)
    singular = torch.linalg.svdvals(whole)
    assert torch.allclose(norms["singular_values"].double(), singular, rtol=1e-3, atol=1e-3 * float(singular.max()))
    assert torch.equal(norms["spectral"], norms["singular_values"][..., 0])
