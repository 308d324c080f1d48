"""What ranks tell each other: an operation and arrays, as bytes. Nothing in a frame is ever executed."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum, unique
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from decoding.partial_forward import LayerSelection
from engine.attention.layout import Layout

Array = npt.NDArray[Any]

_FRAME = struct.Struct("<IHH")  # bytes after these, operation, arrays
_ARRAY = struct.Struct("<HHIqq")  # dtype, dimensions, nothing, shape
_DTYPES = tuple(np.dtype(name) for name in ("uint8", "bool", "int32", "int64", "float32"))
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
HEAD = _FRAME.size
LIMIT = 1 << 32


@unique
class Op(IntEnum):
    """What a frame asks for or says."""

    HELLO = 1  # a rank to the leader: who it is
    WELCOME = 2  # all ranks are there
    REFUSED = 3  # and why
    READY = 4  # a rank has done its part of a start
    GO = 5  # all ranks have
    BEAT = 6  # a rank is alive
    FAILED = 7  # a rank ends, and why
    STORE = 8  # from here on, what the followers repeat
    HIDDEN = 9
    LOGITS = 10
    EMBED = 11
    COPY_BLOCK = 12
    MOVE = 13
    READ_BLOCKS = 14
    WRITE_BLOCKS = 15
    END = 16


def pack(op: Op, arrays: Iterable[Array] = ()) -> bytes:
    """A frame of arrays of at most two dimensions."""
    parts, count = [b""], 0
    for array in arrays:
        shape = array.shape + (1,) * (2 - array.ndim)
        content = array.tobytes()
        parts += [_ARRAY.pack(_CODES[array.dtype], array.ndim, 0, *shape), content, bytes(-len(content) % 8)]
        count += 1
    size = sum(map(len, parts))
    if size >= LIMIT:
        raise ValueError(f"a frame of {size} bytes")
    parts[0] = _FRAME.pack(size, op, count)
    return b"".join(parts)


def unpack_head(head: bytes) -> tuple[Op, int, int]:
    """(operation, arrays, bytes after the head)."""
    size, op, count = _FRAME.unpack(head)
    return Op(op), count, size


def unpack(body: npt.NDArray[np.uint8], count: int) -> list[Array]:
    """The arrays of a frame, views of `body`."""
    arrays, at = [], 0
    for _ in range(count):
        code, ndim, _, *shape = _ARRAY.unpack_from(body.data, at)
        at += _ARRAY.size
        dtype, shape = _DTYPES[code], shape[:ndim]
        size = dtype.itemsize * int(np.prod(shape))
        arrays.append(body[at : at + size].view(dtype).reshape(shape))
        at += size + -size % 8
    return arrays


def pack_text(text: str) -> Array:
    """Text as an array."""
    return np.frombuffer(text.encode(), dtype=np.uint8)


def unpack_text(array: Array) -> str:
    """The text of an array."""
    return bytes(array).decode(errors="replace")


def integers(*values: int) -> Array:
    """int64 [n]."""
    return np.array(values, dtype=np.int64)


def rows_of(states: torch.Tensor) -> Array:
    """float32 [n, width] of hidden states of any precision on any device."""
    return states.to("cpu", torch.float32).contiguous().numpy()


def pack_step(layout: Layout, depth: LayerSelection, states: torch.Tensor | None) -> list[Array]:
    """What a follower must know of a forward; see `engine.backends.stacks.LayerStack.hidden`."""
    last = -1 if depth.last is None else depth.last
    arrays = [
        integers(layout.block_size, depth.first, last, states is not None, *sorted(depth.skipped)),
        layout.tokens,
        layout.positions,
        layout.slots,
        layout.starts,
        layout.lengths,
        layout.blocks,
        layout.offsets,
        integers(*layout.trees),
        integers(*(bound for group in depth.groups for bound in group)),
        integers() if layout.rope_lengths is None else layout.rope_lengths,
        *(mask.numpy() for mask in layout.trees.values()),
    ]
    return arrays if states is None else [*arrays, rows_of(states)]


def unpack_step(arrays: list[Array]) -> tuple[Layout, LayerSelection, torch.Tensor | None]:
    """The other way round; states are float32 on the CPU."""
    block_size, first, last, has_states, *skipped = arrays[0].tolist()
    parts, (sequences, bounds), rest = arrays[1:8], (each.tolist() for each in arrays[8:10]), arrays[11:]
    rope_lengths = arrays[10] if len(arrays[10]) else None
    states = torch.from_numpy(rest.pop()) if has_states else None
    trees = {b: torch.from_numpy(mask) for b, mask in zip(sequences, rest, strict=True)}
    groups = tuple(zip(bounds[::2], bounds[1::2], strict=True))
    depth = LayerSelection(first, None if last < 0 else last, frozenset(skipped), groups)
    tokens, positions, slots, starts, lengths, blocks, offsets = parts
    layout = Layout(tokens, positions, slots, starts, lengths, blocks, offsets, trees, block_size, rope_lengths)
    return layout, depth, states
