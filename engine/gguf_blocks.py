"""Blocks of quantized GGUF tensors as integers in groups, which stand for the numbers that llama.cpp makes of them.

Layouts are those of ggml's `ggml-common.h`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch

from engine.quantized.integers import IntegerWeight

CHUNK = 1 << 22  # numbers that are unpacked at once
BLOCK, SUPER_BLOCK = 32, 256
HIGH_BITS = torch.arange(8, dtype=torch.uint8)
IQ4 = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)


def integers_of(data: Any, kind: str, rows: int, width: int) -> IntegerWeight | None:
    """A weight [rows, width] as it is stored; None where it is of a kind that is not integers.

    Args:
        data: its bytes in the file, uint8.
        kind: name of its type.
    """
    if kind not in UNPACKED:
        return None
    size, step = len(data) // rows, max(1, CHUNK // width)
    parts = []
    for start in range(0, rows, step):
        raw = torch.from_numpy(numpy.array(data[start * size : (start + step) * size]))
        blocks = width // (SUPER_BLOCK if kind.endswith(("_K", "_XS")) else BLOCK)
        parts.append(UNPACKED[kind](raw.view(-1, blocks, size // blocks)))
    return IntegerWeight.joined(parts)


def _q4_0(raw: torch.Tensor) -> IntegerWeight:
    """A float16 scale and 32 numbers of 4 bits, of which 8 is taken."""
    return IntegerWeight(_nibbles(raw[..., 2:]), _halves(raw[..., :2])[..., 0])


def _q4_1(raw: torch.Tensor) -> IntegerWeight:
    """A float16 scale, a float16 minimum, and 32 numbers of 4 bits."""
    scales, minimums = _halves(raw[..., :4]).unbind(-1)
    return IntegerWeight(_nibbles(raw[..., 4:]), scales, minimums=minimums)


def _q5_0(raw: torch.Tensor) -> IntegerWeight:
    """A float16 scale, the highest bits of 32 numbers of 5 bits, and their rest; 16 is taken."""
    codes = _with_high_bits(_nibbles(raw[..., 6:]), raw[..., 2:6])
    return IntegerWeight(codes, _halves(raw[..., :2])[..., 0], small_bits=5)


def _q5_1(raw: torch.Tensor) -> IntegerWeight:
    """As Q5_0, with a float16 minimum after the scale."""
    codes = _with_high_bits(_nibbles(raw[..., 8:]), raw[..., 4:8])
    scales, minimums = _halves(raw[..., :4]).unbind(-1)
    return IntegerWeight(codes, scales, minimums=minimums, small_bits=5)


def _q8_0(raw: torch.Tensor) -> IntegerWeight:
    """A float16 scale and 32 signed bytes."""
    return IntegerWeight(_flat(raw[..., 2:]).view(torch.int8), _halves(raw[..., :2])[..., 0])


def _q4_k(raw: torch.Tensor) -> IntegerWeight:
    """Two float16 factors, 8 scales and minimums of 6 bits, and 8 times 32 numbers of 4 bits."""
    return _super_blocks(raw, _pairs_of_32(raw[..., 16:]), 4)


def _q5_k(raw: torch.Tensor) -> IntegerWeight:
    """As Q4_K, with the fifth bits in between: of the numbers in one place of each group, one byte."""
    high = raw[..., None, 16:48] >> HIGH_BITS[:, None] & 1
    codes = _pairs_of_32(raw[..., 48:]).unflatten(2, (8, 32)) | high << 4  # type: ignore[no-untyped-call]
    return _super_blocks(raw, codes, 5)


def _q6_k(raw: torch.Tensor) -> IntegerWeight:
    """The low 4 and the high 2 bits of 256 numbers, of which 32 is taken; 16 signed scales; a float16 factor."""
    low = raw[..., :128].unflatten(2, (2, 1, 64))  # type: ignore[no-untyped-call]
    low = low >> torch.tensor([0, 4], dtype=torch.uint8)[:, None] & 15
    high = raw[..., 128:192].unflatten(2, (2, 1, 32)) >> HIGH_BITS[::2, None] & 3  # type: ignore[no-untyped-call]
    codes = low.reshape(high.shape) | high << 4
    scales = _flat(raw[..., 192:208]).view(torch.int8)
    return IntegerWeight(_flat(codes), scales, group=16, blocks=_halves(raw[..., 208:]), small_bits=6)


def _q3_k(raw: torch.Tensor) -> IntegerWeight:
    """The third bits of 256 numbers, of which 4 is taken; the rest; 16 scales of 6 bits, of which 32; a factor."""
    third = raw[..., None, :32] >> HIGH_BITS[:, None] & 1
    low = raw[..., 32:96].unflatten(2, (2, 1, 32)) >> HIGH_BITS[::2, None] & 3  # type: ignore[no-untyped-call]
    low_scales = torch.cat([raw[..., 96:104] & 15, raw[..., 96:104] >> 4], dim=2)
    high_scales = raw[..., None, 104:108] >> HIGH_BITS[::2, None] & 3
    scales = _flat(low_scales | high_scales.flatten(2) << 4).to(torch.int8) - 32
    codes = _flat(low) + (_flat(third) << 2) + (32 - 4)  # of 6 bits, the fewest in which 16 share a scale
    return IntegerWeight(codes, scales, group=16, blocks=_halves(raw[..., 108:]), small_bits=6)


def _q2_k(raw: torch.Tensor) -> IntegerWeight:
    """16 scales and minimums of 4 bits, 256 numbers of 2, and two float16 factors; a minimum is taken, not added."""
    codes = raw[..., 16:80].unflatten(2, (2, 1, 32)) >> HIGH_BITS[::2, None] & 3  # type: ignore[no-untyped-call]
    scales = raw[..., :16]
    sizes, leasts = (_flat(each).view(torch.int8) for each in (scales & 15, scales >> 4))
    factors = _halves(raw[..., 80:])
    blocks = torch.stack([factors[..., 0], -factors[..., 1]], dim=2)
    return IntegerWeight(_flat(codes), sizes, minimums=leasts, group=16, blocks=blocks, small_bits=6)


def _iq4_nl(raw: torch.Tensor) -> IntegerWeight:
    """A float16 scale, and 32 of the 16 numbers of a table."""
    return IntegerWeight(IQ4[_nibbles(raw[..., 2:]).long()], _halves(raw[..., :2])[..., 0])


def _iq4_xs(raw: torch.Tensor) -> IntegerWeight:
    """A float16 factor, 8 scales of 6 bits, of which 32 is taken, and 8 times 32 of the numbers of the table."""
    high = raw[..., 2:4, None] >> HIGH_BITS[::2] & 3
    low = raw[..., 4:8, None] >> HIGH_BITS[::4] & 15
    scales = _flat(low.flatten(2) | high.flatten(2) << 4).to(torch.int8) - 32
    codes = IQ4[_nibbles(raw[..., 8:].reshape(len(raw), -1, 16)).long()]
    return IntegerWeight(codes, scales, blocks=_halves(raw[..., :2]))


UNPACKED: dict[str, Callable[[torch.Tensor], IntegerWeight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q3_K": _q3_k,
    "Q2_K": _q2_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}


def _flat(parts: torch.Tensor) -> torch.Tensor:
    return parts.reshape(len(parts), -1).contiguous()


def _halves(raw: torch.Tensor) -> torch.Tensor:
    """float16 numbers [rows, blocks, n] of their bytes."""
    return raw.clone(memory_format=torch.contiguous_format).view(torch.float16)


def _nibbles(raw: torch.Tensor) -> torch.Tensor:
    """The numbers of blocks whose first half is in the low halves of bytes [rows, blocks, 16]."""
    return torch.cat([raw & 15, raw >> 4], dim=2).flatten(1)


def _with_high_bits(codes: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    """Numbers [rows, width] with a fifth bit, the lowest one first [rows, blocks, 4]."""
    bits = raw[..., None] >> HIGH_BITS & 1
    return codes | bits.flatten(1) << 4


def _pairs_of_32(raw: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, super-blocks, 256] of [rows, super-blocks, 128], 32 bytes of which hold 64 neighbours."""
    parts = raw.unflatten(2, (4, 32))  # type: ignore[no-untyped-call]
    return torch.cat([parts & 15, parts >> 4], dim=3).flatten(2)


def _super_blocks(raw: torch.Tensor, codes: torch.Tensor, bits: int) -> IntegerWeight:
    """Q4_K or Q5_K, whose first 16 bytes are factors; what they call a minimum is taken, not added."""
    factors = _halves(raw[..., :4])
    scale, least, rest = raw[..., 4:16].unflatten(2, (3, 4)).unbind(2)  # type: ignore[no-untyped-call]
    scales = torch.cat([scale & 63, rest & 15 | scale >> 2 & 48], dim=2)
    minimums = torch.cat([least & 63, rest >> 4 | least >> 2 & 48], dim=2)
    return IntegerWeight(
        _flat(codes),
        _flat(scales).view(torch.int8),
        minimums=_flat(minimums).view(torch.int8),
        blocks=torch.stack([factors[..., 0], -factors[..., 1]], dim=2),
        small_bits=bits,
    )
