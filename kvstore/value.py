"""Values in the store: a fixed header, the encrypted chunk, and a tag over both and over the key they lie under.

What was cut, changed, written under another key, for another tenant, model, codec or shape, or by another version is
refused before anyone computes with it. Payloads are encrypted and decrypted from memory to memory, without a copy.
"""

from __future__ import annotations

import os
import struct
from hashlib import sha256
from typing import Literal

import torch
from cryptography.exceptions import InvalidTag

from kvstore.base import ChunkShape, Codec
from kvstore.keys import Keyring, Link
from turnout.types import Namespace

MAGIC = b"TOKV"
VERSION = 2
HEADER_BYTES = 96
TAG_BYTES = 16
OVERHEAD_BYTES = HEADER_BYTES + TAG_BYTES
NONCE = slice(64, 76)

# Little-endian: magic, version, codec, dtype | first layer, layers, tokens, KV heads, head width | epoch, payload
# bytes | SHA-256 of the key | nonce | zeros. What comes before the epoch depends on codec and shape only.
_FORM = struct.Struct("<4sHBB HHIHH IQ 32s 12s 20x")
_DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.int8: 4}

Reason = Literal["short", "magic", "version", "header", "epoch", "length", "tag"]


class ValueRefused(Exception):  # noqa: N818  (a refusal is a miss, not an error)
    """Value that is not what was written under its key; it is a miss.

    Args:
        reason: short (less than a header and a tag), magic (not ours), version (of another format), header (for
            another codec, shape or key), epoch (of another key epoch), length (cut or extended), tag (anything
            else: changed, or encrypted with another key).
    """

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


def encoding_name(codec: Codec) -> str:
    """Return the name of a codec's values in keys; it changes with their format or with what reading them needs.

    Nothing is written over what is there, so what only a later or an earlier version reads must lie elsewhere.
    """
    profile: bytes = getattr(codec, "profile_version", b"")
    return f"{codec.name}.{VERSION}" + (f".{profile.hex()}" if profile else "")


def seal(
    keyring: Keyring,
    link: Link,
    key: bytes,
    codec: Codec,
    shape: ChunkShape,
    payload: memoryview,
    out: memoryview | None = None,
) -> memoryview:
    """Make a value: AES-256-GCM with a random 96-bit nonce, authenticated together with its header and key.

    Args:
        keyring: the store's keys.
        link: whose chunk it is.
        key: it will lie under.
        codec: made the payload.
        shape: of the chunk.
        payload: the encoded chunk, contiguous.
        out: room for the value, writable and contiguous, which may be longer; None: a new buffer.

    Returns:
        The value: the first `OVERHEAD_BYTES` + payload bytes of `out`.

    Raises:
        ValueError: the payload is longer than the codec's longest, `out` is too short, or the dtype has no number.
    """
    num_bytes = payload.nbytes
    if num_bytes > codec.max_bytes(shape):
        raise ValueError(f"payload of {num_bytes} bytes, at most {codec.max_bytes(shape)} expected")
    room = memoryview(bytearray(num_bytes + OVERHEAD_BYTES)) if out is None else out.cast("B")
    value = room[: num_bytes + OVERHEAD_BYTES]
    if len(value) < num_bytes + OVERHEAD_BYTES:
        raise ValueError(f"{len(value)} bytes of room, {num_bytes + OVERHEAD_BYTES} needed")
    nonce = os.urandom(12)
    header = _FORM.pack(*_fields(codec, shape), keyring.epoch, num_bytes, sha256(key).digest(), nonce)
    value[:HEADER_BYTES] = header
    keyring.value_key(link.namespace, keyring.epoch).encrypt_into(nonce, payload, header + key, value[HEADER_BYTES:])
    return value


def open_into(
    keyring: Keyring,
    namespace: Namespace,
    key: bytes,
    codec: Codec,
    shape: ChunkShape,
    value: memoryview,
    out: memoryview,
) -> int:
    """Check and decrypt a value.

    Args:
        keyring: the store's keys.
        namespace: whose chunk was asked for.
        key: it was asked for under.
        codec: it was asked for in.
        shape: of the chunk.
        value: what came, contiguous.
        out: where the payload goes, writable and contiguous, which may be longer; it must not overlap `value`. When
            the value is refused, what `out` holds is of no use to anybody.

    Returns:
        Bytes of the payload.

    Raises:
        ValueRefused: it is not the value of this namespace, key, codec and shape.
    """
    value, out = value.cast("B"), out.cast("B")
    if len(value) < OVERHEAD_BYTES:
        raise ValueRefused("short")
    header = bytes(value[:HEADER_BYTES])
    num_bytes = _check_header(keyring, key, codec, shape, header)
    if num_bytes != len(value) - OVERHEAD_BYTES or num_bytes > len(out):
        raise ValueRefused("length")
    cipher = keyring.value_key(namespace, keyring.epoch)
    try:
        cipher.decrypt_into(header[NONCE], value[HEADER_BYTES:], header + key, out[:num_bytes])
    except InvalidTag:
        raise ValueRefused("tag") from None
    return num_bytes


def _check_header(keyring: Keyring, key: bytes, codec: Codec, shape: ChunkShape, header: bytes) -> int:
    """Return the bytes of the payload, if this is the header of what was asked for."""
    magic, version, *fields = _FORM.unpack(header)
    if magic != MAGIC:
        raise ValueRefused("magic")
    if version != VERSION:
        raise ValueRefused("version")
    epoch, num_bytes, _, nonce = fields[-4:]
    # what no field has is zero
    if header != _FORM.pack(*_fields(codec, shape), epoch, num_bytes, sha256(key).digest(), nonce):
        raise ValueRefused("header")
    if epoch != keyring.epoch:
        raise ValueRefused("epoch")
    return int(num_bytes)


def _fields(codec: Codec, shape: ChunkShape) -> tuple[bytes | int, ...]:
    """Parse what the header says about codec and shape."""
    if shape.dtype not in _DTYPES:
        raise ValueError(f"{shape.dtype} has no number in headers; those have: {', '.join(map(str, _DTYPES))}")
    sizes = (shape.first_layer, shape.layers, shape.tokens, shape.kv_heads, shape.head_dim)
    return (MAGIC, VERSION, codec.number, _DTYPES[shape.dtype], *sizes)
