"""Compression by a model's probabilities: what comes back, how long the code is, and what is refused."""

from __future__ import annotations

import asyncio
import random
import zlib
from typing import Any

import numpy as np
import pytest
import torch

from decoding.fakes import TableModel
from decoding.tasks import _container
from decoding.tasks._arithmetic import PEAK, Decoder, Encoder, ideal_bits, weights_of
from decoding.tasks._container import Container, Shape, checksum, unpack
from decoding.tasks._lanes import Logits, bytes_of, tokens_of, walk
from decoding.tasks.base import MOST_ENCODED, Progress, from_base64, to_base64
from decoding.tasks.compress import MOST_BYTES, CompressResult
from decoding.tasks.decompress import DecompressResult
from tests.decoding.task_runs import BEGIN, TEXTS, VOCAB, byte_model, result_of, task_run
from turnout.errors import Code, TurnoutError, out_of_range

TEXT = "Adaptive decoding: a small model writes, a large one reads. Gr\u00fc\u00dfe! " * 3


def rows(seed: int, count: int, vocab: int, spread: float) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, spread, (count, vocab)).astype(np.float32)


@pytest.mark.parametrize(("vocab", "spread"), [(2, 0.0), (2, 40.0), (7, 3.0), (3000, 1.0), (3000, 12.0)])
def test_coded_tokens_come_back_and_cost_their_information(vocab: int, spread: float) -> None:
    logits = rows(1, 300, vocab, spread)
    # Half of them likely ones, half any: the unlikeliest has weight 1.
    draw = random.Random(vocab)
    tokens = [int(row.argmax()) if draw.random() < 0.5 else draw.randrange(vocab) for row in logits]
    encoder, bits, by_model = Encoder(), 0.0, 0.0
    for row, token in zip(logits, tokens, strict=True):
        weights = weights_of(row)
        encoder.encode(weights, token)
        bits -= np.log2(int(weights[token]) / int(weights.sum()))
        by_model += ideal_bits(row, token)
    code = encoder.finish()
    # But for the last byte, and what the coder's whole units lose of each token.
    assert bits - 9 <= 8 * len(code) <= bits + 9 + 0.001 * len(tokens)
    if spread <= 3.0:  # no token is so unlikely that its weight is more than its probability
        assert abs(bits - by_model) < 0.02 * len(tokens)
    decoder = Decoder(code)
    assert [decoder.decode(weights_of(row)) for row in logits] == tokens


def test_a_carry_runs_through_bytes_that_are_full() -> None:
    """The last of many tokens each time: the interval stays at the upper end of what it was."""
    weights = np.array([PEAK] * 3 + [1], dtype=np.int64)
    for last in range(4):
        tokens = [3] * 40 + [last] + [0, 3] * 10
        encoder = Encoder()
        for token in tokens:
            encoder.encode(weights, token)
        decoder = Decoder(encoder.finish())
        assert [decoder.decode(weights) for _ in tokens] == tokens


def test_weights_are_whole_numbers_by_differences_of_logits() -> None:
    logits = np.array([0.0, -1.0, -1.0 / 64, -100.0, float("-inf")], dtype=np.float32)
    weights = weights_of(logits)
    assert weights.tolist() == [PEAK, int(PEAK * np.exp(-1.0)), int(PEAK * np.exp(-1.0 / 64)), 1, 1]
    assert weights_of(logits + np.float32(8.0)).tolist() == weights.tolist()
    for bad in (float("nan"), float("inf")):
        with pytest.raises(TurnoutError) as refused:
            weights_of(np.array([0.0, bad], dtype=np.float32))
        assert refused.value.code is Code.INTERNAL


async def compressed(model: TableModel, **params: Any) -> CompressResult:
    found = await result_of("compress", model, **params)
    assert isinstance(found, CompressResult)
    return found


async def restored(model: TableModel, data: str) -> DecompressResult:
    found = await result_of("decompress", model, data=data)
    assert isinstance(found, DecompressResult)
    return found


@pytest.mark.parametrize("shape", [{}, {"window": 16, "overlap": 5, "lanes": 3}, {"window": 2, "overlap": 0}])
@pytest.mark.parametrize("original", [TEXT.encode(), b"\xff\x00\x80 no text \xfe" * 4, b"x", "\u00fc".encode()])
async def test_what_is_decompressed_is_what_was_compressed(original: bytes, shape: dict[str, int]) -> None:
    model = byte_model(3)
    made = await compressed(model, data=to_base64(original), **shape)
    packed = from_base64(made.data, "data")
    assert len(packed) == made.compressed_bytes
    assert made.original_bytes == len(original)
    back = await restored(model, made.data)
    assert from_base64(back.data, "data") == original
    try:
        assert back.text == original.decode()
        assert made.characters == len(original.decode())
    except UnicodeDecodeError:
        assert (back.text, made.characters, made.bits_per_character) == (None, None, None)


async def test_a_better_model_needs_fewer_bits_and_the_code_is_as_long_as_its_information() -> None:
    """The table knows the text by heart with some certainty; uniform needs eight bits for a byte."""
    data = TEXT.encode()
    before: dict[int, set[int]] = {}
    for one, other in zip((BEGIN, *data), data, strict=False):
        before.setdefault(one, set()).add(other)

    def knows(certainty: float) -> TableModel:
        def logits(tokens: list[int]) -> torch.Tensor:
            row = torch.zeros(VOCAB)
            row[list(before.get(tokens[-1], ()))] = certainty
            return row

        return TableModel("large", logits, VOCAB)

    sizes = [await compressed(knows(certainty), text=TEXT) for certainty in (0.0, 2.0, 8.0)]
    assert sizes[0].code_bytes > sizes[1].code_bytes > sizes[2].code_bytes
    assert sizes[0].bits_per_byte == pytest.approx(np.log2(VOCAB), abs=0.1)
    assert sizes[2].code_bytes < len(zlib.compress(data, 9))
    for made in sizes:
        assert made.model_bits - 9 <= 8 * made.code_bytes <= made.model_bits + 9 + 0.02 * made.tokens
        assert made.bits_per_character == pytest.approx(8 * made.code_bytes / len(TEXT))


async def test_a_token_is_read_after_at_least_the_overlap_and_at_most_a_window() -> None:
    seen: list[tuple[int, int]] = []

    def logits(tokens: list[int]) -> torch.Tensor:
        seen.append((len(tokens), tokens[-1]))
        return torch.zeros(VOCAB)

    data = bytes(range(1, 41))
    progress = Progress()
    model = TableModel("large", logits, VOCAB)
    await result_of("compress", model, progress, data=to_base64(data), window=10, overlap=4, lanes=2)
    # Two lanes of twenty tokens: 10 + 6 + 4 tokens are coded, and four are read again before each of the last two.
    assert model.fed_tokens == 0
    assert progress.prompt_tokens == 2 * (10 + 10 + 8)
    assert max(length for length, _ in seen) == 10
    assert all(max(length for length, fed in seen if fed == token) > 4 for token in data[9:19])


def parts(packed: bytes) -> Container:
    return unpack(packed, "data")


async def test_containers_of_others_and_damaged_ones_are_refused() -> None:
    model = byte_model(3)
    packed = from_base64((await compressed(model, text=TEXT)).data, "data")
    assert parts(packed).pack() == packed
    model_digest = model.digest
    other = byte_model(3, "other")
    assert other.digest != model_digest
    with pytest.raises(TurnoutError, match="another model") as refused:
        await restored(other, to_base64(packed))
    assert (refused.value.code, refused.value.field) == (Code.INVALID_ARGUMENT, "params.data")
    for end in range(len(packed)):
        with pytest.raises(TurnoutError) as refused:
            parts(packed[:end])
        assert refused.value.field == "data"
    for place in range(0, len(packed), 3):
        damaged = bytearray(packed)
        damaged[place] ^= 0x10
        with pytest.raises(TurnoutError):
            parts(bytes(damaged))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"lanes": 1}, Code.INVALID_ARGUMENT),
        ({"lanes": 1 << 40}, Code.INVALID_ARGUMENT),
        ({"window": 1 << 40}, Code.INVALID_ARGUMENT),
        ({"overlap": 512}, Code.INVALID_ARGUMENT),
        ({"start": VOCAB}, Code.INVALID_ARGUMENT),
        ({"vocab_size": 1}, Code.INVALID_ARGUMENT),
        ({"tokens": 0}, Code.OUT_OF_RANGE),
        ({"tokens": 1 << 40, "size": 1 << 40}, Code.OUT_OF_RANGE),
        ({"tokens": 1 << 17, "size": 1 << 17, "window": 64, "overlap": 63}, Code.OUT_OF_RANGE),
    ],
)
async def test_a_container_that_promises_too_much_is_refused_before_a_forward(
    change: dict[str, int], code: Code
) -> None:
    model = byte_model(3)
    found = parts(from_base64((await compressed(model, text="abc")).data, "data"))
    forged = Container(found.model, found.numerics, _replace(found.shape, change), found.checksum, found.code)
    with pytest.raises(TurnoutError) as refused:
        await restored(model, to_base64(forged.pack()))
    assert refused.value.code is code


async def test_forwards_are_counted_before_they_run() -> None:
    for tokens, window, overlap, lanes in ((5, 16, 5, 2), (41, 16, 5, 2), (90, 8, 7, 3), (64, 4, 0, 4)):
        shape, model = Shape(VOCAB, lanes, window, overlap, BEGIN, tokens, tokens), byte_model(3)
        ran = Progress()

        def coded(lane: int, index: int, logits: Logits, numerics: str) -> int:
            return 1

        await walk(task_run(model), shape, coded, ran, "params.window")
        assert shape.forwards * len(shape.lengths) == ran.prompt_tokens


async def test_lanes_without_room_are_refused_by_the_parameter_that_asks_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = byte_model(3)
    made = await compressed(model, text=TEXT)

    async def full(seq: Any, op: Any) -> Any:
        raise out_of_range("window", "2 lanes of 512 tokens; large has room for 16 each")

    monkeypatch.setattr(model, "do", full)
    with pytest.raises(TurnoutError, match="room for 16") as refused:
        await result_of("compress", model, text=TEXT)
    assert refused.value.field == "params.window"
    with pytest.raises(TurnoutError, match="room for 16") as refused:
        await result_of("decompress", model, data=made.data)
    assert refused.value.field == "params.data"


def test_the_longest_code_of_the_most_bytes_has_room() -> None:
    """No token takes more bits than all weights together have over the least one."""
    most_bits = np.log2(float(PEAK) * (1 << 18))
    assert len(to_base64(bytes(int(MOST_BYTES * most_bits / 8) + 128))) <= MOST_ENCODED


def _replace(shape: Shape, change: dict[str, int]) -> Shape:
    values = {name: getattr(shape, name) for name in Shape.__slots__}
    return Shape(**{**values, **change})


async def test_other_numbers_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what computed them, and where that is equal by the checksum of what comes out."""
    model = byte_model(3)
    made = await compressed(model, text=TEXT)
    changed = byte_model(4)
    with pytest.raises(TurnoutError, match="checksum") as refused:
        await restored(changed, made.data)
    assert refused.value.code is Code.INTERNAL
    monkeypatch.setattr(_container, "numerics_mark", lambda _: b"else")
    monkeypatch.setattr("decoding.tasks.decompress.numerics_mark", lambda _: b"else")
    with pytest.raises(TurnoutError, match="other kernels"):
        await restored(model, made.data)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({}, "params.text"),
        ({"text": "a", "data": "YQ=="}, "params.text"),
        ({"text": ""}, "params.text"),
        ({"data": "no base64"}, "params.data"),
        ({"text": "a", "window": 1}, "params.window"),
        ({"text": "a", "window": 10, "overlap": 10}, "params.overlap"),
        ({"text": "a", "overlap": -1}, "params.overlap"),
        ({"text": "a", "lanes": 1}, "params.lanes"),
        ({"text": "a", "lanes": float("nan")}, "params.lanes"),
        ({"text": "a", "windows": 8}, "params.windows"),
        ({"text": "x" * 40_000, "window": 64, "overlap": 63}, "params.overlap"),
        ({"data": to_base64(b"x" * (256 * 1024 + 1))}, "params.data"),
    ],
)
async def test_parameters_are_refused_by_name(params: dict[str, Any], field: str) -> None:
    with pytest.raises(TurnoutError) as refused:
        await result_of("compress", byte_model(3), **params)
    assert refused.value.field == field
    assert refused.value.code in (Code.INVALID_ARGUMENT, Code.OUT_OF_RANGE)


async def test_bytes_that_no_token_writes_are_refused() -> None:
    model = byte_model(3)
    small = TableModel("large", model.next_logits, 200)
    with pytest.raises(TurnoutError, match="0xff") as refused:
        await result_of("compress", small, data=to_base64(b"a\xff"))
    assert refused.value.field == "params.data"


async def test_tokens_are_the_tokenizers_where_these_keep_every_byte() -> None:
    run = task_run(byte_model(3))

    async def wrong(text: str) -> list[int]:
        return [*text.strip().encode()]

    assert await tokens_of(b"ab", run, TEXTS, "text") == [97, 98]
    run.encode = wrong
    assert bytes_of(await tokens_of(b" ab ", run, TEXTS, "text"), TEXTS) == b" ab "


async def test_a_cancelled_task_leaves_nothing() -> None:
    model = byte_model(3)
    reached = asyncio.Event()
    progress = Progress(lambda done, of: reached.set() if done == 5 else None)
    task = asyncio.create_task(result_of("compress", model, progress, text=TEXT))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not model.lanes


def test_a_checksum_is_of_the_original() -> None:
    assert checksum(b"a") != checksum(b"b")
