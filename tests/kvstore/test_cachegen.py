from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoding.artifacts import Artifact
from kvstore.base import ChunkShape
from kvstore.codecs import _coder
from kvstore.codecs.base import filled_up, load_codec
from kvstore.codecs.cachegen import DEPTHS, GROUP, LEVELS, SIDES, CacheGenCodec
from kvstore.profiles import cell_bytes, cell_weights, read_profiles
from tests.kvstore.profiled import DIGEST, alike_kv, alike_profiles, demo_kv, profiles_of, shape_of
from tests.properties import cases
from turnout.errors import Code, TurnoutError

HEADER = 12


def codec_of(name: str = "cachegen-1") -> CacheGenCodec:
    return CacheGenCodec(name, alike_profiles()["cachegen"])


def round_trip(codec: CacheGenCodec, kv: torch.Tensor, shape: ChunkShape) -> tuple[torch.Tensor, int]:
    before = kv.clone()
    payload = codec.encode(kv, shape)
    assert payload.nbytes <= codec.max_bytes(shape)
    assert torch.equal(kv.nan_to_num(), before.nan_to_num())
    out = torch.full(shape.size, torch.nan, dtype=shape.dtype)
    codec.decode(memoryview(bytearray(payload)), shape, out)
    return out, payload.nbytes


def kept_of(codec: CacheGenCodec, kv: torch.Tensor, shape: ChunkShape) -> int:
    return int(struct.unpack_from("<6sB1xI", codec.encode(kv, shape))[2])


# The coder


@cases(50)
@given(rows=st.integers(1, 5), num=st.integers(1, 60), symbols=st.integers(2, 300), seed=st.integers(0, 999))
def test_symbols_come_back(rows: int, num: int, symbols: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = _coder.make_tables(rng.integers(1, 10**6, (rows, symbols)))
    drawn = rng.integers(0, symbols, (rows, num)).astype(np.int32)
    other = rng.integers(0, symbols, (rows, 3)).astype(np.int32)
    stream = _coder.encode([(drawn, tables), (other, tables)])
    back, back_other = np.empty_like(drawn), np.empty_like(other)
    _coder.decode(stream, [(back, tables), (back_other, tables)])
    assert np.array_equal(back, drawn)
    assert np.array_equal(back_other, other)


def test_a_stream_is_as_long_as_its_symbols_are_improbable() -> None:
    rng = np.random.default_rng(4)
    weights = rng.integers(1, 10**6, (64, 40)) ** 2
    shares = weights / weights.sum(1, keepdims=True)
    drawn = np.stack([rng.choice(40, 300, p=row) for row in shares]).astype(np.int32)
    bits = -np.log2(np.take_along_axis(shares, drawn, 1)).sum()
    stream = _coder.encode([(drawn, _coder.make_tables(weights))])
    assert bits * 0.98 < stream.nbytes * 8 < bits * 1.001 + 64


def test_histograms_survive_a_byte_a_cell() -> None:
    counts = np.random.default_rng(1).integers(0, 10**5, (20, 64)) ** 1.5
    weights = cell_weights(cell_bytes(counts))
    scaled = counts / counts.max(1, keepdims=True) * (31 << 15)
    assert (np.abs(weights - scaled) <= np.maximum(scaled / 31, 16)).all()
    assert (cell_weights(cell_bytes(np.zeros((1, 8)))) == 31 << 15).all()


def test_a_symbol_weighs_what_lies_between_its_edges() -> None:
    cells = cell_bytes(np.array([[1.0, 3.0, 0.0, 4.0]]))
    weights = cell_weights(cells)[0]
    half = _coder.FINE // 2
    edges = np.array([[-999, _coder.FINE + half, 3 * _coder.FINE, 999999]])
    first, second, third = _coder.symbol_weights(cells, edges)[0]
    least = (weights.sum() * _coder.FINE >> _coder.LEAST_SHARE) + 1
    assert first == weights[0] * _coder.FINE + weights[1] * half + least
    assert second == weights[1] * half + weights[2] * _coder.FINE + least
    assert third == weights[3] * _coder.FINE + least


# The format


@pytest.mark.parametrize("tokens", [1, 9, 10, 11, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_come_back_within_half_a_step(tokens: int, dtype: torch.dtype) -> None:
    kv = alike_kv(tokens, seed=5).to(dtype)
    shape = shape_of(kv)
    for name, level in LEVELS.items():
        out, _ = round_trip(codec_of(name), kv, shape)
        tensors = alike_profiles()["cachegen"].tensors
        depths = torch.tensor(DEPTHS)[:, None, None] * torch.tensor(SIDES)[:, None]
        size = (3, 1, 2, 2, 8)
        step = ((tensors["high"] - tensors["low"]) / 255).view(size)
        bins = (tensors["spread"] * level * depths).view(size)
        error = (out.float() - kv.float()).abs()
        rounding = 0.005 * (kv.float().abs() + bins) if dtype == torch.bfloat16 else 1e-4
        anchors = torch.arange(tokens) % GROUP == 0
        assert (error <= step / 2 + rounding)[:, anchors].all()
        assert (error <= bins / 2 + rounding)[:, ~anchors].all()


def test_levels_trade_bytes_for_precision() -> None:
    kv = alike_kv(256, seed=6).to(torch.bfloat16)
    found = [round_trip(codec_of(name), kv, shape_of(kv)) for name in LEVELS]
    sizes = [num for _, num in found]
    errors = [float((out.float() - kv.float()).square().sum()) for out, _ in found]
    assert sizes == sorted(sizes, reverse=True)
    assert errors == sorted(errors)
    assert all(kv.nbytes / size > 2.5 for size in sizes)


def test_a_group_depends_on_no_other() -> None:
    kv = alike_kv(40, seed=7)
    shape, codec = shape_of(kv), codec_of()
    before, _ = round_trip(codec, kv, shape)
    other = kv.clone()
    other[:, 10:20] = alike_kv(10, seed=8)
    after, _ = round_trip(codec, other, shape)
    assert torch.equal(after[:, :10], before[:, :10])
    assert torch.equal(after[:, 20:], before[:, 20:])
    assert not torch.equal(after[:, 10:20], before[:, 10:20])


def test_layers_may_be_stored_apart() -> None:
    kv = alike_kv(64, seed=9)
    codec = codec_of()
    whole, _ = round_trip(codec, kv, shape_of(kv))
    last, _ = round_trip(codec, kv[1:].contiguous(), shape_of(kv[1:], first_layer=1))
    assert torch.equal(last, whole[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_has_no_symbol_is_kept_as_it_was(dtype: torch.dtype) -> None:
    kv = alike_kv(64, seed=10).to(dtype)
    shape, codec = shape_of(kv), codec_of()
    usual = kept_of(codec, kv, shape)
    strange = {(0, 0, 0, 1, 2): 1e4, (1, 5, 1, 0, 3): torch.nan, (2, 20, 0, 1, 7): torch.inf, (2, 63, 1, 1, 1): -3e4}
    for place, value in strange.items():
        kv[place] = value
    out, _ = round_trip(codec, kv, shape)
    assert all(torch.equal(out[place], kv[place]) or kv[place].isnan() for place in strange)
    assert out[1, 5, 1, 0, 3].isnan()
    assert out.isfinite().sum() == out.numel() - 2
    assert kept_of(codec, kv, shape) <= usual + 2 + 2 * GROUP  # an anchor beyond its range takes its group with it


def test_a_chunk_unlike_the_model_takes_no_more_than_the_tensor() -> None:
    kv = torch.randn((3, 64, 2, 2, 8), generator=torch.Generator().manual_seed(1)) * 1e6
    out, size = round_trip(codec_of(), kv, shape_of(kv))
    assert torch.equal(out, kv)
    assert size == HEADER + kv.nbytes


@pytest.mark.parametrize("name", LEVELS)
def test_the_length_that_is_seen_does_not_tell_what_is_in_it(name: str) -> None:
    codec = codec_of(name)
    chunks = [alike_kv(64, seed).to(torch.bfloat16) for seed in range(20, 28)]
    shape = shape_of(chunks[0])
    payloads = [codec.encode(kv, shape) for kv in chunks]
    assert len({payload.nbytes for payload in payloads}) > 1
    sealed = [filled_up(codec, shape, payload) for payload in payloads]
    most, usual = codec.max_bytes(shape), codec.usual_bytes(shape)
    assert {payload.nbytes for payload in sealed} <= {usual, usual - (-most // 16)}
    for payload, longer in zip(payloads, sealed, strict=True):
        assert 0 <= longer.nbytes - payload.nbytes <= max(usual - payload.nbytes, most / 16 + 1)
        outs = [torch.empty_like(chunks[0]) for _ in range(2)]
        for each, out in zip((payload, longer), outs, strict=True):
            codec.decode(memoryview(bytearray(each)), shape, out)
        assert torch.equal(*outs)


def test_a_chunk_stored_as_it_is_may_be_filled_up_too() -> None:
    kv = torch.randn((3, 64, 2, 2, 8), generator=torch.Generator().manual_seed(1)) * 1e6
    shape, codec = shape_of(kv), codec_of()
    out = torch.empty_like(kv)
    codec.decode(memoryview(bytearray(bytes(codec.encode(kv, shape)) + bytes(7))), shape, out)
    assert torch.equal(out, kv)
    assert filled_up(codec, shape, codec.encode(kv, shape)).nbytes == codec.max_bytes(shape)


# Bad input


def test_broken_payloads_raise_value_errors_and_never_hang() -> None:
    kv = alike_kv(64, seed=11).to(torch.bfloat16)
    kv[0, 0, 0, 0, 0] = 1e4
    shape, codec = shape_of(kv), codec_of()
    payload = bytes(codec.encode(kv, shape))
    out = torch.empty_like(kv)
    rng = np.random.default_rng(3)
    refused = 0
    for _ in range(300):
        broken = bytearray(payload)
        broken[rng.integers(len(broken))] ^= 1 << int(rng.integers(8))
        try:
            codec.decode(memoryview(broken), shape, out)
        except ValueError:
            refused += 1
    assert refused > 250  # a bit of an element that was kept as it was changes that element and nothing else
    for length in (0, 5, HEADER, HEADER + 3, len(payload) // 2, len(payload) - 1):
        with pytest.raises(ValueError, match=r"shorter|length"):
            codec.decode(memoryview(payload[:length]), shape, out)
    with pytest.raises(ValueError, match="length"):
        codec.decode(memoryview(payload + b"\0\0\0\1"), shape, out)
    with pytest.raises(ValueError, match="mode 7"):
        codec.decode(memoryview(payload[:6] + b"\7" + payload[7:]), shape, out)
    noise = payload[:8] + rng.bytes(len(payload) - 8)
    with pytest.raises(ValueError, match="length"):
        codec.decode(memoryview(noise), shape, out)


def test_another_profile_or_another_model_is_refused() -> None:
    kv = alike_kv(32, seed=12)
    payload = codec_of().encode(kv, shape_of(kv))
    other = CacheGenCodec("cachegen-1", profiles_of(alike_kv(300, seed=3))["cachegen"])
    with pytest.raises(ValueError, match="another profile"):
        other.decode(payload, shape_of(kv), torch.empty_like(kv))
    with pytest.raises(ValueError, match="profile of 3 layers and 16 channels"):
        codec_of().encode(kv, shape_of(kv, first_layer=1))
    wide = alike_kv(32, seed=12, width=9)
    with pytest.raises(ValueError, match="profile of 3 layers and 16 channels"):
        codec_of().encode(wide, shape_of(wide))


def test_without_a_profile_the_start_is_refused_with_the_command_that_makes_one() -> None:
    with pytest.raises(TurnoutError, match="turnout train kv-codecs") as caught:
        load_codec("cachegen-2", {})
    assert caught.value.code is Code.INVALID_ARGUMENT


def test_profiles_are_found_by_the_models_digest(tmp_path: Path) -> None:
    profile = alike_profiles()["cachegen"]
    named = {f"small.{name}": tensor for name, tensor in profile.tensors.items()}
    Artifact("kv-cachegen", "test", {}, {"small": DIGEST}, named).save(tmp_path / "cachegen.safetensors")
    found = read_profiles(tmp_path, DIGEST)
    assert list(found) == ["cachegen"]
    assert torch.equal(found["cachegen"].tensors["spread"], profile.tensors["spread"])
    assert found["cachegen"].layers == 3
    assert read_profiles(tmp_path, "1" * 32) == {}
    assert read_profiles(None, DIGEST) == {}
    Artifact("medusa", "test", {}, {"small": DIGEST}, named).save(tmp_path / "cachegen.safetensors")
    assert read_profiles(tmp_path, DIGEST) == {}


# What it is worth, on the demo's large model


def bits_of(weights: np.ndarray, symbols: np.ndarray) -> float:
    shares = weights / weights.sum(-1, keepdims=True)
    return float(-np.log2(np.take_along_axis(shares, symbols, -1)).sum())


def test_tables_by_channel_beat_one_table_and_streams_reach_their_entropy() -> None:
    sequences = demo_kv()
    codec = CacheGenCodec("cachegen-1", profiles_of(*sequences[1::2])["cachegen"])
    kv = torch.cat(sequences[::2], 1)[:, :512].to(torch.bfloat16).contiguous()
    shape = shape_of(kv)
    anchors, differences, kept = codec._symbols(kv.view(8, 512, 2, 128).permute(0, 2, 3, 1).float(), shape)
    assert int(kept.sum()) < 0.001 * kv.numel()
    by_channel, whole = 0.0, np.zeros(1)
    for layer in range(8):
        for side in range(2):
            first, second = codec.weights(layer, side)
            by_channel += bits_of(first, anchors[layer, side]) + bits_of(second, differences[layer, side])
    size = codec.encode(kv, shape).nbytes
    overhead = HEADER + 16 * (4 + 8) + int(kept.sum()) * 6
    assert 0.999 * by_channel / 8 < size < 1.02 * by_channel / 8 + overhead
    one = 0.0
    for symbols in (anchors, differences):
        whole = np.bincount(symbols.reshape(-1)) + 1.0  # of these very symbols: the best that one table can be
        one += bits_of(np.broadcast_to(whole, (1, len(whole))), symbols.reshape(1, -1))
    assert by_channel < 0.98 * one


def test_what_is_coded_varies_less_than_values_and_than_plain_differences() -> None:
    """Plain differences do where neighbours are alike; the demo model's are not, there they vary more than values."""
    for sequences, plain_is_less in (([alike_kv(200, seed) for seed in range(5)], True), (demo_kv(), False)):
        groups = [
            (kv[:, i : i + 1], kv[:, i + 1 : i + GROUP]) for kv in sequences for i in range(0, kv.shape[1], GROUP)
        ]
        whole = torch.cat([others for _, others in groups], 1).double()
        variance = (whole - whole.mean(1, keepdim=True)).square().mean((1, 3, 4))
        plain = torch.cat([others - anchor for anchor, others in groups], 1).double().square().mean((1, 3, 4))
        tensors = profiles_of(*sequences)["cachegen"].tensors
        coded = tensors["spread"].double().square().mean(-1)
        assert (coded < variance).all()
        assert (coded < plain).all()
        assert bool((plain < variance).all()) == plain_is_less
        weight, shift = (tensors[name].view(variance.shape[0], 1, 2, *whole.shape[3:]) for name in ("weight", "shift"))
        left = torch.cat([others - (weight * anchor + shift) for anchor, others in groups], 1).double()
        assert torch.allclose(left.square().mean((1, 3, 4)), coded, rtol=1e-3)


def test_profile_of_a_silent_channel_works() -> None:
    kv = alike_kv(128, seed=13)
    kv[:, :, :, 0, 0] = 1.5
    codec = CacheGenCodec("cachegen-0", profiles_of(kv)["cachegen"])
    out, _ = round_trip(codec, kv, shape_of(kv))
    assert torch.allclose(out[:, :, :, 0, 0], kv[:, :, :, 0, 0], atol=1e-2)
    assert replace(alike_profiles()["cachegen"]).layers == 3
