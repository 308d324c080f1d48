"""The container of compressed data: what a decoder must know, checked before any model is asked.

    magic 4 | version 1 | model 8 | numerics 4 | numbers (LEB128) | checksum 8 | code | CRC-32 4

The checksum is of the original, the CRC of everything before it, so that truncated or changed data is refused at once.
"""

from __future__ import annotations

import zlib
from dataclasses import astuple, dataclass, fields
from hashlib import blake2b

from turnout.errors import invalid

MAGIC, VERSION = b"TLMZ", 1
MODEL_BYTES, NUMERICS_BYTES, CHECKSUM_BYTES, CRC_BYTES = 8, 4, 8, 4
HEAD = len(MAGIC) + 1
LONGEST_NUMBER = 9  # bytes
MOST_FORWARDS = 1 << 18


@dataclass(frozen=True, slots=True)
class Shape:
    """What both sides must do alike.

    Attributes:
        vocab_size: tokens of the model.
        lanes: of a forward.
        window: tokens that a lane reads before it begins anew.
        overlap: of these, tokens that it then reads again.
        start: the token that stands before the first one of each lane.
        tokens: in all.
        size: bytes of the original.
    """

    vocab_size: int
    lanes: int
    window: int
    overlap: int
    start: int
    tokens: int
    size: int

    @property
    def lengths(self) -> list[int]:
        """Tokens of each lane that has any: the text is cut into runs of equal length, the last one shorter."""
        each = -(-self.tokens // self.lanes) if self.tokens > self.window else self.tokens
        return [min(each, self.tokens - begin) for begin in range(0, self.tokens, max(each, 1))]

    @property
    def forwards(self) -> int:
        """Forwards that read all lanes, tokens that are read again included; `overlap` is less than `window`."""
        longest = max(self.lengths, default=0)
        again = -(-max(longest - self.window, 0) // (self.window - self.overlap))
        return longest + again * self.overlap


@dataclass(frozen=True, slots=True)
class Container:
    """Compressed data.

    Attributes:
        model: digest of the model that coded it.
        numerics: digest of what computed its logits.
        checksum: of the original.
        code: the arithmetic code.
    """

    model: bytes
    numerics: bytes
    shape: Shape
    checksum: bytes
    code: bytes

    def pack(self) -> bytes:
        """Return it as bytes."""
        numbers = b"".join(map(_packed, astuple(self.shape)))
        whole = MAGIC + bytes([VERSION]) + self.model + self.numerics + numbers + self.checksum + self.code
        return whole + zlib.crc32(whole).to_bytes(CRC_BYTES, "big")


def unpack(data: bytes, field: str) -> Container:
    """Return what bytes hold.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the field: they are no container, of another version, or damaged.
    """
    if data[: len(MAGIC)] != MAGIC:
        raise invalid(field, "is not what the task compress makes: it must begin with TLMZ")
    if len(data) < HEAD or data[len(MAGIC)] != VERSION:
        raise invalid(field, f"has another version than {VERSION}, or is cut off")
    body, crc = data[:-CRC_BYTES], data[-CRC_BYTES:]
    if len(body) < HEAD or zlib.crc32(body).to_bytes(CRC_BYTES, "big") != crc:
        raise invalid(field, "is cut off or was changed: its CRC does not fit")
    place = HEAD + MODEL_BYTES + NUMERICS_BYTES
    model, numerics = body[HEAD : HEAD + MODEL_BYTES], body[HEAD + MODEL_BYTES : place]
    numbers = []
    for _ in fields(Shape):
        number, place = _unpacked(body, place, field)
        numbers.append(number)
    code = place + CHECKSUM_BYTES
    if len(body) < code:
        raise invalid(field, "is cut off")
    return Container(model, numerics, Shape(*numbers), body[place:code], body[code:])


def model_mark(digest: str) -> bytes:
    """What a container says of its model."""
    return blake2b(digest.encode(), digest_size=MODEL_BYTES).digest()


def numerics_mark(numerics: str) -> bytes:
    """What a container says of what computed its logits."""
    return blake2b(numerics.encode(), digest_size=NUMERICS_BYTES).digest()


def checksum(data: bytes) -> bytes:
    """What a container says of the original."""
    return blake2b(data, digest_size=CHECKSUM_BYTES).digest()


def _packed(number: int) -> bytes:
    """LEB128."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _unpacked(data: bytes, place: int, field: str) -> tuple[int, int]:
    """A number, and where it ends."""
    number = 0
    for index, byte in enumerate(data[place : place + LONGEST_NUMBER]):
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return number, place + index + 1
    raise invalid(field, "is cut off or was changed: it holds a number without an end")
