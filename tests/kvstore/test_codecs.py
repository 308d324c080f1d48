from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.base import ChunkShape, Codec
from kvstore.codecs import base
from kvstore.codecs.base import codec_numbers, landing, load_codec
from kvstore.codecs.fp8 import _as_half
from tests.kvstore.chunks import SHAPE, some_kv
from turnout.errors import Code, TurnoutError

PLAIN = ("raw", "fp8", "int8")
LOSSY = ("fp8", "int8")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SLOT = "codecs_of_tests"
FAMILY = """
from kvstore.codecs.base import CodecFamily
PART = CodecFamily({numbers}, lambda name, profiles: (name, profiles))
"""
shapes = st.builds(
    ChunkShape,
    first_layer=st.integers(0, 9),
    layers=st.integers(1, 3),
    tokens=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 11),
    dtype=st.sampled_from(DTYPES),
)


def codec(name: str) -> Codec:
    return load_codec(name, {})


def round_trip(name: str, kv: torch.Tensor, shape: ChunkShape) -> torch.Tensor:
    """What comes back; encoding leaves kv as it is, and its length is what was announced."""
    before = kv.clone()
    payload = codec(name).encode(kv, shape)
    assert payload.nbytes == codec(name).max_bytes(shape)
    assert torch.equal(bits(kv), bits(before))
    out = torch.full(shape.size, torch.nan, dtype=shape.dtype)
    codec(name).decode(memoryview(bytearray(payload)), shape, out)
    return out


def bits(kv: torch.Tensor) -> torch.Tensor:
    return kv.view(-1).view(torch.uint8)


def shape_of(kv: torch.Tensor) -> ChunkShape:
    layers, tokens, _, kv_heads, head_dim = kv.shape
    return ChunkShape(0, layers, tokens, kv_heads, head_dim, kv.dtype)


def largest(kv: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    return kv.float().abs().amax(dims, keepdim=True)


@pytest.fixture
def slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of codecs: the family `one`, a helper, and what a test puts there."""
    package = tmp_path / SLOT
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "one.py").write_text(FAMILY.format(numbers={"one": 1, "one-big": 2}), encoding="utf-8")
    (package / "helper.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(base, "PACKAGE", SLOT)
    yield package
    for name in [name for name in sys.modules if name.startswith(SLOT)]:
        del sys.modules[name]


def test_no_two_codecs_have_one_number() -> None:
    found = codec_numbers()
    assert {"raw": 1, "fp8": 2, "int8": 3}.items() <= found.items()
    assert len(set(found.values())) == len(found)


def test_codecs_are_what_their_family_says() -> None:
    for name in PLAIN:
        assert (codec(name).name, codec(name).number) == (name, codec_numbers()[name])
        assert codec(name).lossless == (name == "raw")


def test_a_new_family_is_a_new_file(slot: Path) -> None:
    (slot / "two.py").write_text(FAMILY.format(numbers={"two-4": 9}), encoding="utf-8")
    assert codec_numbers() == {"one": 1, "one-big": 2, "two-4": 9}
    assert load_codec("two-4", {"two": 5}) == ("two-4", {"two": 5})
    assert load_codec("one-big", {}) == ("one-big", {})


def test_other_families_are_not_imported(slot: Path) -> None:
    (slot / "broken.py").write_text("raise RuntimeError('not asked for')", encoding="utf-8")
    assert load_codec("one", {}) == ("one", {})


@pytest.mark.parametrize(
    "numbers", [{"two": 1}, {"two": 5, "two-b": 5}, {"two": 256}, {"two": -1}, {"three": 3}, {"two-:": 3}]
)
def test_a_number_or_name_that_may_not_be_is_caught(slot: Path, numbers: dict[str, int]) -> None:
    (slot / "two.py").write_text(FAMILY.format(numbers=numbers), encoding="utf-8")
    with pytest.raises(TypeError, match="codec"):
        codec_numbers()


@pytest.mark.parametrize("name", ["zstd", "", "raw-2", "base", "helper", "../raw", "RAW"])
def test_an_unknown_codec_is_refused_with_those_that_exist(name: str) -> None:
    with pytest.raises(TurnoutError) as refusal:
        load_codec(name, {}, "kvstore.codecs")
    assert refusal.value.code is Code.NOT_FOUND
    assert refusal.value.field == "kvstore.codecs"
    assert all(known in str(refusal.value) for known in codec_numbers())


@given(shapes, st.integers(0, 1000))
def test_raw_gives_back_every_bit(shape: ChunkShape, seed: int) -> None:
    noise = torch.randint(0, 256, (shape.raw_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    kv = noise.view(shape.dtype).view(shape.size)  # infinities and NaN of every kind among them
    assert torch.equal(bits(round_trip("raw", kv, shape)), noise)


@pytest.mark.parametrize("dtype", DTYPES)
def test_raw_copies_nothing(dtype: torch.dtype) -> None:
    shape = replace(SHAPE, dtype=dtype)
    kv, raw = some_kv(shape), codec("raw")
    payload = raw.encode(kv, shape)
    assert torch.frombuffer(payload, dtype=torch.uint8).data_ptr() == kv.data_ptr()
    assert bytes(payload) == bytes(kv.flatten().view(torch.uint8).tolist())
    place = landing(raw, shape, kv, memoryview(bytearray(1)))
    assert torch.frombuffer(place, dtype=torch.uint8).data_ptr() == kv.data_ptr()
    before = kv.clone()
    raw.decode(place, shape, kv)
    assert torch.equal(kv, before)


def test_other_codecs_land_in_the_slab() -> None:
    buffer = memoryview(bytearray(SHAPE.raw_bytes))
    for name in LOSSY:
        place = landing(codec(name), SHAPE, some_kv(SHAPE), buffer)
        assert place.obj is buffer.obj
        assert place.nbytes == codec(name).max_bytes(SHAPE)


@given(shapes, st.integers(0, 1000), st.integers(-30, 30), st.sampled_from(LOSSY))
def test_lossy_codecs_keep_their_bound_at_every_shape_and_scale(
    shape: ChunkShape, seed: int, exponent: int, name: str
) -> None:
    if shape.dtype == torch.float16:
        exponent = exponent % 8 - 4  # its range ends at 2**16
    kv = some_kv(shape, seed).mul_(2.0**exponent)
    error = (round_trip(name, kv, shape).float() - kv.float()).abs()
    # Besides the codec's own error: the dtype's rounding of what comes back, and its smallest step.
    info = torch.finfo(shape.dtype)
    rounding = kv.float().abs() * info.eps + info.smallest_normal * info.eps
    if name == "fp8":
        bound = torch.maximum(kv.float().abs() / 16, largest(kv, (1, 4)) * 2.0**-16)
    else:
        keys = largest(kv[:, :, 0], (1,)).expand(kv[:, :, 0].shape)
        bound = torch.stack([keys, largest(kv[:, :, 1], (3,)).expand(keys.shape)], dim=2) / 127 * 0.5001
    assert bool((error <= bound + 2 * rounding).all())


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros(name: str, dtype: torch.dtype) -> None:
    shape = replace(SHAPE, dtype=dtype)
    kv = torch.zeros(shape.size, dtype=dtype)
    assert torch.equal(round_trip(name, kv, shape), kv)
    kv[1] = 1.0  # next to one that is not zero
    assert torch.equal(round_trip(name, kv, shape), kv)


@pytest.mark.parametrize("name", LOSSY)
def test_nothing_is_divided_by_zero(name: str) -> None:
    # what a NaN becomes as an integer is the machine's choice, so none may come about on the way
    payload = codec(name).encode(torch.zeros(SHAPE.size), SHAPE)
    scales = torch.frombuffer(payload[: -SHAPE.raw_bytes // 4], dtype=torch.float32)
    assert bool((scales > 0).all())


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_values_stay_finite(name: str, dtype: torch.dtype) -> None:
    shape, info = replace(SHAPE, dtype=dtype), torch.finfo(dtype)
    for size in (info.max / 2, info.smallest_normal, info.smallest_normal * info.eps, 1e-30, 1.0):
        kv = some_kv(shape).sign_().mul_(size)
        kv[0, 0, 0, 0, 0] = 0.0
        kv[0, 1, 1, 1, 1] = size / 3
        back = round_trip(name, kv, shape)
        assert bool(torch.isfinite(back).all()), size
        assert bool((back.float().abs() <= kv.float().abs().max() * 1.01).all()), size


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 3.0e38])
@pytest.mark.parametrize("half", [0, 1])
def test_lossy_codecs_refuse_what_is_not_finite(name: str, value: float, half: int) -> None:
    kv = some_kv(SHAPE)
    kv[2, 3, half, 1, 7] = value
    with pytest.raises(ValueError, match="finite"):
        codec(name).encode(kv, SHAPE)


def test_fp8_codes_are_e4m3() -> None:
    codes = torch.arange(-128, 128).to(torch.int8)
    theirs = codes.view(torch.float8_e4m3fn).float()
    ours = _as_half(codes).float() * 256
    real = ~theirs.isnan()
    assert int(real.sum()) == 254
    assert torch.equal(ours[real], theirs[real])
    assert bool(torch.isfinite(ours).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_gives_back_what_it_can_write(dtype: torch.dtype) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.abs() < 448]  # 448 itself would take the next scale
    kv = torch.stack([numbers, numbers / 2**20], dim=1).view(1, -1, 2, 1, 1).to(dtype)
    assert kv.numel() == 2 * 252
    assert torch.equal(round_trip("fp8", kv, shape_of(kv)), kv)


def _fp8_reference(kv: torch.Tensor) -> torch.Tensor:
    """By torch's own conversion, with the least power of two above the largest value over 448."""
    scale = torch.exp2(torch.floor(torch.log2((largest(kv, (1, 4)) / 448).double())) + 1).float()
    return ((kv.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(kv.dtype)


@given(shapes.filter(lambda shape: shape.dtype != torch.float16), st.integers(0, 1000))
def test_fp8_is_torchs_conversion(shape: ChunkShape, seed: int) -> None:
    kv = some_kv(shape, seed) * 3
    assert torch.equal(round_trip("fp8", kv, shape), _fp8_reference(kv))


def test_int8_by_hand() -> None:
    kv = torch.zeros(1, 2, 2, 1, 2)
    kv[0, :, 0, 0] = torch.tensor([[127.0, 1.0], [-63.6, 0.4]])  # keys: a scale per channel, 1 and 1/127
    kv[0, :, 1, 0] = torch.tensor([[254.0, 3.1], [0.0, -1.27]])  # values: a scale per token, 2 and 0.01
    expected = torch.tensor([[[127.0, 1.0], [254.0, 4.0]], [[-64.0, 51 / 127], [0.0, -1.27]]]).view(1, 2, 2, 1, 2)
    torch.testing.assert_close(round_trip("int8", kv, shape_of(kv)), expected, rtol=1e-6, atol=0)


def test_int8_outliers_cost_precision_where_they_are_only() -> None:
    shape = replace(SHAPE, tokens=32)
    plain = some_kv(shape)
    kv = plain.clone()
    kv[:, :, 0, :, 3] *= 1000  # a channel of the keys
    kv[:, 5, 1] *= 1000  # a token of the values
    error = (round_trip("int8", kv, shape) - kv).abs()
    untouched = kv == plain
    assert float(error[untouched].max()) < 0.02
    # with the scales the other way round every token of every key would lose its small channels
    shared = largest(kv[:, :, 0], (3,)) / 127
    other_way = (kv[:, :, 0] / shared).round() * shared - kv[:, :, 0]
    assert float(other_way[untouched[:, :, 0]].abs().max()) > 1.0


@pytest.mark.parametrize("name", PLAIN)
def test_a_payload_of_another_length_is_refused(name: str) -> None:
    payload = bytes(codec(name).encode(some_kv(SHAPE), SHAPE))
    out = torch.empty(SHAPE.size)
    for other in (b"", payload[:-1], payload + b"\0", payload * 2):
        with pytest.raises(ValueError, match="payload"):
            codec(name).decode(memoryview(other), SHAPE, out)
    codec(name).decode(memoryview(payload), SHAPE, out)  # memory that may not be written to


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("scale", [b"\0\0\xc0\x7f", b"\0\0\x80\xff"])
def test_a_payload_with_broken_scales_is_refused(name: str, scale: bytes) -> None:
    payload = bytearray(codec(name).encode(some_kv(SHAPE), SHAPE))
    payload[4:8] = scale
    with pytest.raises(ValueError, match="scales"):
        codec(name).decode(memoryview(payload), SHAPE, torch.empty(SHAPE.size))


@pytest.mark.parametrize("name", LOSSY)
@given(data=st.data())
def test_no_payload_at_all_gives_nan(name: str, data: st.DataObject) -> None:
    payload = bytearray(codec(name).encode(some_kv(SHAPE), SHAPE))
    codes = SHAPE.raw_bytes // 4
    noise = data.draw(st.binary(min_size=codes, max_size=codes))
    payload[-codes:] = noise
    out = torch.empty(SHAPE.size)
    codec(name).decode(memoryview(payload), SHAPE, out)
    assert bool(torch.isfinite(out).all())


@pytest.mark.parametrize("name", PLAIN)
def test_a_tensor_of_another_shape_is_refused(name: str) -> None:
    kv = some_kv(SHAPE)
    payload = memoryview(bytearray(codec(name).encode(kv, SHAPE)))
    wrong = (kv[:, :2], kv.double(), kv.transpose(0, 1).contiguous().transpose(0, 1), kv.flatten(), kv.to("meta"))
    for other in wrong:
        with pytest.raises(ValueError, match="chunk"):
            codec(name).encode(other, SHAPE)
        with pytest.raises(ValueError, match="chunk"):
            codec(name).decode(payload, SHAPE, other)


@pytest.mark.parametrize("name", PLAIN)
def test_payloads_at_odd_addresses_are_read(name: str) -> None:
    kv = some_kv(SHAPE)
    payload = codec(name).encode(kv, SHAPE)
    room = bytearray(payload.nbytes + 3)
    room[3:] = payload
    out = torch.empty(SHAPE.size)
    codec(name).decode(memoryview(room)[3:], SHAPE, out)
    assert torch.equal(out, round_trip(name, kv, SHAPE))


@pytest.mark.parametrize("name", PLAIN)
def test_tensors_of_inference_mode_are_taken(name: str) -> None:
    with torch.inference_mode():
        kv = some_kv(SHAPE)
        out = torch.empty(SHAPE.size)
    payload = codec(name).encode(kv, SHAPE)
    with torch.inference_mode():
        codec(name).decode(memoryview(bytearray(payload)), SHAPE, out)
    assert torch.equal(out, round_trip(name, some_kv(SHAPE), SHAPE))


@pytest.mark.parametrize(("name", "ratio"), [("raw", 1.0), ("fp8", 1.99), ("int8", 1.7)])
def test_sizes_beside_bf16(name: str, ratio: float) -> None:
    shape = ChunkShape(0, 12, 64, 2, 64, torch.bfloat16)
    assert shape.raw_bytes / codec(name).max_bytes(shape) >= ratio
