from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore import value as values
from kvstore.base import ChunkShape, Codec
from kvstore.codecs.base import bytes_of, load_codec
from kvstore.keys import Keyring, redis_key
from kvstore.value import HEADER_BYTES, OVERHEAD_BYTES, VERSION, ValueRefused, open_into, seal
from tests.kvstore.chunks import ALICE, BOB, MODEL, ROOT, SHAPE, some_kv, some_link

RING = Keyring(ROOT, epoch=7)
RAW = load_codec("raw", {})
LINK = some_link(RING)
KEY = redis_key(RING, MODEL, LINK, "raw", 0)
PAYLOAD = bytes(bytes_of(some_kv(SHAPE)))
# Where what lies in a header, and what a change there is refused for.
FIELDS = {
    range(4): "magic",
    range(4, 6): "version",
    range(6, 20): "header",  # codec, dtype, shape
    range(20, 24): "epoch",
    range(24, 32): "length",
    range(32, 64): "header",  # the key's digest
    range(64, 76): "tag",  # nonce
    range(76, 96): "header",  # zeros
}


def sealed(ring: Keyring = RING, key: bytes = KEY, codec: Codec = RAW, shape: ChunkShape = SHAPE) -> bytearray:
    return bytearray(seal(ring, LINK, key, codec, shape, memoryview(PAYLOAD)))


def opened(value: bytes | bytearray, key: bytes = KEY, codec: Codec = RAW, shape: ChunkShape = SHAPE) -> bytes:
    out = memoryview(bytearray(shape.raw_bytes))
    return bytes(out[: open_into(RING, ALICE, key, codec, shape, memoryview(value), out)])


def refusal(value: bytes | bytearray, key: bytes = KEY, codec: Codec = RAW, shape: ChunkShape = SHAPE) -> str:
    with pytest.raises(ValueRefused) as refused:
        opened(value, key, codec, shape)
    return refused.value.reason


def forged(value: bytearray, start: int, field: bytes) -> bytearray:
    """The value with other bytes in its header."""
    return bytearray(value[:start] + field + value[start + len(field) :])


def flips(value: bytearray, places: Iterator[int] | range) -> Iterator[tuple[int, bytearray]]:
    """Every change of one bit at these bytes."""
    for place in places:
        for bit in range(8):
            yield place, forged(value, place, bytes([value[place] ^ 1 << bit]))


def test_what_was_sealed_comes_back() -> None:
    assert opened(sealed()) == PAYLOAD


def test_the_header_is_as_written_down() -> None:
    value = sealed()
    assert len(value) == 96 + len(PAYLOAD) + 16
    assert struct.unpack_from("<4sHBBHHIHHIQ", value) == (b"TOKV", VERSION, 1, 1, 2, 3, 4, 2, 8, 7, len(PAYLOAD))
    assert value[32:64] == sha256(KEY).digest()
    assert value[76:96] == bytes(20)
    assert PAYLOAD[:16] not in value


def test_every_flipped_bit_of_the_header_is_refused_with_its_reason() -> None:
    value = sealed()
    assert sorted(place for places in FIELDS for place in places) == list(range(HEADER_BYTES))
    for places, reason in FIELDS.items():
        for place, changed in flips(value, places):
            assert refusal(changed) == reason, place
    assert opened(value) == PAYLOAD


def test_every_flipped_bit_behind_the_header_is_refused() -> None:
    value = sealed()
    places = [*range(HEADER_BYTES, HEADER_BYTES + 20), *range(200, len(value), 61), *range(len(value) - 17, len(value))]
    for place, changed in flips(value, iter(places)):
        assert refusal(changed) == "tag", place


@given(st.data())
def test_no_change_at_all_is_let_through(data: st.DataObject) -> None:
    value = sealed()
    start = data.draw(st.integers(0, len(value) - 1))
    piece = data.draw(st.binary(min_size=1, max_size=40))
    changed = bytearray(value[:start] + piece + value[start + data.draw(st.integers(0, 40)) :])
    if changed != value:
        refusal(changed)
    assert opened(value) == PAYLOAD


def test_a_cut_or_extended_value_is_refused() -> None:
    value = sealed()
    for length in range(OVERHEAD_BYTES):
        assert refusal(value[:length]) == "short"
    for length in (*range(OVERHEAD_BYTES, len(value), 53), len(value) - 16, len(value) - 1):
        assert refusal(value[:length]) == "length"
    for more in (b"\0", b"\0" * 16, value):
        assert refusal(value + more) == "length"
    shorter = forged(value[:-8], 24, struct.pack("<Q", len(PAYLOAD) - 8))
    assert refusal(shorter) == "tag"
    longer = forged(value + b"\0", 24, struct.pack("<Q", len(PAYLOAD) + 1))
    assert refusal(longer) == "length"


def test_a_value_under_another_key_is_refused() -> None:
    other = redis_key(RING, MODEL, some_link(RING, seed=9), "raw", 0)
    theirs = sealed(key=other)
    assert refusal(theirs) == "header"
    assert refusal(forged(theirs, 32, sha256(KEY).digest())) == "tag"
    assert opened(theirs, key=other) == PAYLOAD


def test_another_namespace_epoch_or_root_cannot_read_it() -> None:
    value = sealed()
    out = memoryview(bytearray(len(PAYLOAD)))
    others = {
        "namespace": (RING, BOB, value, "tag"),
        "root": (Keyring(ROOT[::-1], 7), ALICE, value, "tag"),
        "epoch": (Keyring(ROOT, 8), ALICE, value, "epoch"),
        "forged epoch": (Keyring(ROOT, 8), ALICE, forged(value, 20, struct.pack("<I", 8)), "tag"),
    }
    for what, (ring, namespace, changed, reason) in others.items():
        with pytest.raises(ValueRefused) as refused:
            open_into(ring, namespace, KEY, RAW, SHAPE, memoryview(changed), out)
        assert refused.value.reason == reason, what


def test_a_value_of_a_future_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(values, "VERSION", VERSION + 1)
        value = sealed()
        assert opened(value) == PAYLOAD
    assert refusal(value) == "version"


@pytest.mark.parametrize(
    "change",
    [
        {"first_layer": 3}, {"layers": 4}, {"tokens": 8}, {"kv_heads": 4}, {"head_dim": 16}, {"dtype": torch.bfloat16},
        {"tokens": 2, "head_dim": 16}, {"kv_heads": 4, "head_dim": 4},
    ],
)  # fmt: skip
def test_a_value_of_another_shape_is_refused(change: dict[str, int]) -> None:
    assert refusal(sealed(), shape=replace(SHAPE, **change)) == "header"


def test_a_value_of_another_codec_is_refused() -> None:
    assert refusal(sealed(), codec=load_codec("fp8", {})) == "header"


def test_no_two_values_share_a_nonce() -> None:
    made = [sealed() for _ in range(200)]
    assert len({bytes(value[64:76]) for value in made}) == 200
    assert made[0][HEADER_BYTES:] != made[1][HEADER_BYTES:]


def test_payloads_of_every_length_come_back() -> None:
    for length in (0, 1, 15, 16, 17, 127, SHAPE.raw_bytes):
        value = seal(RING, LINK, KEY, RAW, SHAPE, memoryview(PAYLOAD)[:length])
        assert opened(bytearray(value)) == PAYLOAD[:length]


def test_a_value_is_made_in_the_room_given_and_read_into_the_tensor_given() -> None:
    kv = some_kv(SHAPE)
    room = bytearray(SHAPE.raw_bytes + OVERHEAD_BYTES + 10)
    room[-10:] = b"untouched!"
    value = seal(RING, LINK, KEY, RAW, SHAPE, RAW.encode(kv, SHAPE), memoryview(room))
    assert len(value) == len(room) - 10
    assert value.obj is room
    assert room[-10:] == b"untouched!"
    both = torch.zeros(2, *SHAPE.size)
    assert open_into(RING, ALICE, KEY, RAW, SHAPE, value, bytes_of(both)) == SHAPE.raw_bytes
    assert torch.equal(both[0], kv)
    assert not both[1].any()


def test_payloads_are_not_copied() -> None:
    shape = replace(SHAPE, layers=64, tokens=64)
    kv, back = some_kv(shape), torch.empty(shape.size)
    room = memoryview(bytearray(shape.raw_bytes + OVERHEAD_BYTES))
    tracemalloc.start()
    try:
        value = seal(RING, LINK, KEY, RAW, shape, RAW.encode(kv, shape), room)
        open_into(RING, ALICE, KEY, RAW, shape, value, bytes_of(back))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert torch.equal(kv, back)
    assert most < shape.raw_bytes / 20


def test_too_little_room_is_refused_before_anything_is_written() -> None:
    room = bytearray(len(PAYLOAD) + OVERHEAD_BYTES - 1)
    with pytest.raises(ValueError, match="room"):
        seal(RING, LINK, KEY, RAW, SHAPE, memoryview(PAYLOAD), memoryview(room))
    assert not any(room)
    with pytest.raises(ValueError, match="at most"):
        seal(RING, LINK, KEY, RAW, SHAPE, memoryview(PAYLOAD + b"x"))
    out = memoryview(bytearray(len(PAYLOAD) - 1))
    with pytest.raises(ValueRefused, match="length"):
        open_into(RING, ALICE, KEY, RAW, SHAPE, memoryview(sealed()), out)
    with pytest.raises(ValueError, match="no number"):
        sealed(shape=replace(SHAPE, dtype=torch.float64))


def test_threads_may_share_a_keyring() -> None:
    ring = Keyring(ROOT, epoch=7)

    def work(seed: int) -> bool:
        kv, back = some_kv(SHAPE, seed), torch.empty(SHAPE.size)
        link = some_link(ring, ALICE if seed % 2 else BOB, seed)
        key = redis_key(ring, MODEL, link, "raw", 0)
        value = seal(ring, link, key, RAW, SHAPE, RAW.encode(kv, SHAPE))
        open_into(ring, link.namespace, key, RAW, SHAPE, value, bytes_of(back))
        return torch.equal(kv, back)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(200)))
