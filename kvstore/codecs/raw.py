"""The tensor's own bytes (little-endian), bit for bit: the one codec whose values `exact` requests read."""

from __future__ import annotations

import torch

from kvstore.base import ChunkShape
from kvstore.codecs.base import CodecFamily, bytes_of, check_chunk, check_payload, read_tensor


class RawCodec:
    """Identity: a chunk's bytes are sent from its memory, and a value may be decrypted into it.

    Every bit pattern is kept, infinities and NaN with their payloads among them.
    """

    name = "raw"
    number = 1
    lossless = True
    in_place = True

    def max_bytes(self, shape: ChunkShape) -> int:
        """Return bytes of every encoded chunk of this shape."""
        return shape.raw_bytes

    def encode(self, kv: torch.Tensor, shape: ChunkShape) -> memoryview:
        """Return the memory of kv [layers, tokens, 2, kv_heads, head_dim] itself.

        Raises:
            ValueError: kv is not such a chunk.
        """
        check_chunk(kv, shape)
        return bytes_of(kv)

    @torch.inference_mode()
    def decode(self, payload: memoryview, shape: ChunkShape, out: torch.Tensor) -> None:
        """Copy the payload into `out`, unless it lies there already.

        Raises:
            ValueError: the payload has another length, or `out` is not such a chunk.
        """
        check_chunk(out, shape)
        check_payload(payload, shape.raw_bytes)
        source = read_tensor(payload, torch.uint8)
        if source.data_ptr() != out.data_ptr():
            out.view(-1).view(torch.uint8).copy_(source)


PART = CodecFamily({RawCodec.name: RawCodec.number}, lambda name, profiles: RawCodec())
