"""Headers of GGUF files: metadata, and where each tensor lies. Reads no tensor.

Own parsing, since `gguf.GGUFReader` makes an array of every string: seconds for a vocabulary, which
`turnout config check` would wait for. Block sizes and the types' names are the library's.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from turnout.errors import invalid

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
MOST_DIMS = 4
STRING, ARRAY = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# What `gguf.quants.dequantize` turns into float32.
TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS"),
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a GGUF file.

    Attributes:
        kind: name of its type, one of `TYPES`.
        shape: as torch has it: rows first.
        file: which of the model's files holds it.
        offset: of its first byte in that file.
        size: in the file, bytes.
    """

    kind: str
    shape: tuple[int, ...]
    file: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata by key, and tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_header(path: Path, field: str, file: int = 0) -> Header:
    """Read the header of one GGUF file, and check that every tensor that it lists is in the file.

    Args:
        path: the file.
        field: its place in the configuration, for messages.
        file: its number among the files of the model.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`: it is no GGUF file, is cut off, is big-endian, or has a tensor of
            a type that is not supported.
    """
    try:
        with path.open("rb") as stream:
            size = path.stat().st_size
            _check_start(path, stream.read(8), field)
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                metadata, found, end = _parse(_Cursor(data))
    except OSError as error:
        raise invalid(field, f"cannot read {path}: {error.strerror or error}") from None
    except (struct.error, EOFError):
        raise invalid(field, f"{path} is cut off in its header; copy it again") from None
    except (ValueError, KeyError, RecursionError) as error:
        raise invalid(field, f"{path} has a header that is not valid GGUF: {error}") from None
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise invalid(field, f"{path}: general.alignment must be a positive number, not {alignment!r}")
    start = -(-end // alignment) * alignment
    tensors = {
        name: _stored(path, name, shape, kind, start + offset, file, field) for name, shape, kind, offset in found
    }
    end = max((each.offset + each.size for each in tensors.values()), default=0)
    if end > size:
        raise invalid(field, f"{path} is cut off: it lacks {end - size:,} bytes of its tensors; copy it again")
    return Header(metadata, tensors)


class _Cursor:
    """A position in a header."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.place = 8  # after magic and version

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self.data, self.place)
        self.place += struct.calcsize(f"<{form}")
        return value

    def numbers(self, form: str, count: int) -> list[Any]:
        form = f"<{self._within(count, struct.calcsize(f'<{form}'))}{form}"
        values = struct.unpack_from(form, self.data, self.place)
        self.place += struct.calcsize(form)
        return list(values)

    def string(self) -> str:
        length = self._within(self.number("Q"), 1)
        self.place += length
        return self.data[self.place - length : self.place].decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.number(NUMBERS[kind])
        kind, count = self.number("I"), self.number("Q")
        if kind in NUMBERS:
            return self.numbers(NUMBERS[kind], count)
        return [self.value(kind) for _ in range(self._within(count, 8))]

    def _within(self, count: int, size: int) -> int:
        if self.place + count * size > len(self.data):
            raise EOFError
        return count


def _check_start(path: Path, start: bytes, field: str) -> None:
    if start[:4] != MAGIC:
        raise invalid(field, f"{path} is not a GGUF file: it does not start with GGUF")
    (version,) = struct.unpack("<I", start[4:].ljust(4, b"\0"))
    if version and not version & 0xFFFF:
        raise invalid(field, f"{path} is a big-endian GGUF file; only little-endian ones are supported")
    if version not in VERSIONS:
        raise invalid(field, f"{path} is GGUF version {version}; supported: {', '.join(map(str, VERSIONS))}")


def _parse(cursor: _Cursor) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], int, int]], int]:
    """Metadata; name, shape, type and offset of each tensor; and where the header ends."""
    num_tensors, num_values = cursor.number("Q"), cursor.number("Q")
    metadata = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("I"))
    tensors = []
    for _ in range(num_tensors):
        name, num_dims = cursor.string(), cursor.number("I")
        if num_dims > MOST_DIMS:
            raise ValueError(f"{name} has {num_dims} dimensions")
        shape = tuple(reversed(cursor.numbers("Q", num_dims)))  # GGUF has the fastest dimension first
        tensors.append((name, shape, cursor.number("I"), cursor.number("Q")))
    return metadata, tensors, cursor.place


def _stored(
    path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int, file: int, field: str
) -> StoredTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    known = {each.value: each for each in GGMLQuantizationType}
    stored = known[kind].name if kind in known else f"type {kind}"
    if stored not in TYPES:
        message = f"{path}: {name} is stored as {stored}, which is not supported; supported: {', '.join(TYPES)}"
        raise invalid(field, message)
    block, size = GGML_QUANT_SIZES[known[kind]]
    if not shape or shape[-1] % block:
        raise invalid(field, f"{path}: {name} of shape {list(shape)} cannot be stored as {stored}")
    return StoredTensor(stored, shape, file, offset, prod(shape) // block * size)
