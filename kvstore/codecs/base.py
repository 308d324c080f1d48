"""The codec slot: families of codecs found by file name, and what every codec does with tensors and bytes.

A codec's name is its family's, or that followed by a dash and a level: `cachegen-2` is made by `cachegen.py`. A module
here that assigns a `CodecFamily` to `PART` is a family; helpers that families share assign none. Nothing lists them
twice.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvstore.base import ChunkShape, Codec
from turnout.errors import not_found
from turnout.registry import names

PACKAGE = "kvstore.codecs"
STEPS = 16  # lengths above the usual one that payloads may have where they differ with what they hold


@dataclass(frozen=True, slots=True)
class CodecFamily:
    """Codecs of a module of this package.

    Attributes:
        numbers: every codec's name and its number in headers (0 to 255), which no other format may ever have.
        make: (name, profiles) -> the codec; raises `TurnoutError` where it lacks the model's profile.
    """

    numbers: Mapping[str, int]
    make: Callable[[str, Mapping[str, Any]], Codec]


def load_codec(name: str, profiles: Mapping[str, Any], field: str = "kvstore.codecs") -> Codec:
    """Load the codec of that name; no other family's module is imported.

    Args:
        name: of the codec.
        profiles: by family, what was learned about the model for it; a family that needs none ignores them.
        field: where the name was given.

    Raises:
        TurnoutError: NOT_FOUND, listing what exists; or the family's refusal of what `profiles` lack.
    """
    family = name.partition("-")[0]
    part = _family(family) if family in names(PACKAGE) else None
    if part is None or name not in part.numbers:
        raise not_found(field, name, sorted(codec_numbers()))
    return part.make(name, profiles)


def codec_numbers() -> dict[str, int]:
    """Return every codec's name and number; imports all families.

    Raises:
        TypeError: two codecs have one number, a number does not fit a header, or a name is not its family's.
    """
    found: dict[str, int] = {}
    for family in names(PACKAGE):
        part = _family(family)
        for name, number in part.numbers.items() if part is not None else ():
            if name.partition("-")[0] != family or not name.replace("-", "").isalnum():
                raise TypeError(f"{PACKAGE}.{family} names a codec {name!r}")
            if number in found.values() or not 0 <= number <= 255:
                raise TypeError(f"codec {name!r} has number {number}, which is taken or beyond 0 to 255")
            found[name] = number
    return found


def _family(name: str) -> CodecFamily | None:
    part = getattr(importlib.import_module(f"{PACKAGE}.{name}"), "PART", None)
    return part if isinstance(part, CodecFamily) else None


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor: a writable view of its memory, one byte an item."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def landing(codec: Codec, shape: ChunkShape, out: torch.Tensor, buffer: memoryview) -> memoryview:
    """Return memory for a value's payload, of which `codec.decode` makes `out`.

    Args:
        codec: of the value.
        shape: of the chunk.
        out: the chunk's tensor.
        buffer: room for the largest payload.

    Returns:
        `out`'s own bytes where the codec leaves them as they are, which saves a copy; else the buffer's first bytes.
    """
    return bytes_of(out) if getattr(codec, "in_place", False) else buffer[: codec.max_bytes(shape)]


def filled_up(codec: Codec, shape: ChunkShape, payload: memoryview) -> memoryview:
    """Pad a payload to one of few lengths, as the length is visible in Redis.

    Else an attacker with the model could encode a guessed prompt, and compare the lengths of its chunks. Where a
    codec's payloads differ in length, zeros that its `decode` passes over make them as long as is usual, or longer by
    whole sixteenths of the longest.
    """
    usual_bytes = getattr(codec, "usual_bytes", None)
    if usual_bytes is None:
        return payload
    usual, most = usual_bytes(shape), codec.max_bytes(shape)
    step = -(-most // STEPS)
    beyond = max(0, -(-(payload.nbytes - usual) // step))
    return memoryview(bytes(payload).ljust(min(usual + beyond * step, most), b"\0"))


def check_chunk(kv: torch.Tensor, shape: ChunkShape) -> None:
    """Refuse a tensor that is not a contiguous CPU chunk of this shape.

    Raises:
        ValueError: it is not.
    """
    if kv.shape != shape.size or kv.dtype != shape.dtype or kv.device.type != "cpu" or not kv.is_contiguous():
        raise ValueError(f"not a contiguous CPU chunk {shape.size} of {shape.dtype}: {tuple(kv.shape)} of {kv.dtype}")


def check_payload(payload: memoryview, num_bytes: int) -> None:
    """Refuse a payload of another length.

    Raises:
        ValueError: it has one.
    """
    if payload.nbytes != num_bytes:
        raise ValueError(f"payload of {payload.nbytes} bytes, {num_bytes} expected")


def read_tensor(payload: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """View a payload as a flat tensor; it shares the memory where that may be written to."""
    # torch warns about memory that it cannot write to, and scales may lie at odd addresses: those are copied.
    shared = not payload.readonly and dtype.itemsize == 1
    return torch.frombuffer(payload if shared else bytearray(payload), dtype=dtype)
