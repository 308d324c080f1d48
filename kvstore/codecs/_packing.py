"""Codes of 2, 3, 4 or 8 bits in bytes, without a gap."""

from __future__ import annotations

import torch

WIDTHS = (2, 3, 4, 8)
# Three bits are a plane of two and a plane of one, so that every plane fills its bytes evenly.
_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}


def packed_bytes(num: int, bits: int) -> int:
    """Return the bytes of `num` codes, a multiple of 8."""
    return num * bits // 8


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes, uint8 [n] below 2**bits, n a multiple of 8, into uint8 [n * bits / 8].

    A plane of w bits keeps code i in byte i mod (n * w / 8): neighbours lie in neighbouring bytes, so that packing and
    unpacking run over whole rows.
    """
    planes, shift = [], 0
    for width in _PLANES[bits]:
        rows = codes.bitwise_right_shift(shift).bitwise_and_((1 << width) - 1).view(8 // width, -1)
        plane = rows[0].clone()
        for place in range(1, len(rows)):
            plane.bitwise_or_(rows[place].bitwise_left_shift_(place * width))
        planes.append(plane)
        shift += width
    return torch.cat(planes) if len(planes) > 1 else planes[0]


def unpack(packed: torch.Tensor, num: int, bits: int) -> torch.Tensor:
    """Unpack codes to uint8 [num]."""
    codes = torch.zeros(num, dtype=torch.uint8)
    start = shift = 0
    for width in _PLANES[bits]:
        end = start + packed_bytes(num, width)
        plane, rows = packed[start:end], codes.view(8 // width, -1)
        for place in range(len(rows)):
            field = plane.bitwise_right_shift(place * width).bitwise_and_((1 << width) - 1)
            rows[place].bitwise_or_(field.bitwise_left_shift_(shift))
        start, shift = end, shift + width
    return codes
