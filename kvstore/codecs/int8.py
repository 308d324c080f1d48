"""Eight-bit integers with a scale: half the bytes of bf16, 127 even steps to each side of zero.

Keys have a few channels that are large at every token, values have large tokens (KIVI, arXiv 2402.02750): so keys
share a scale along the chunk's tokens, one per (layer, head, channel), and values along the channels, one per (layer,
head, token). An outlier then costs precision where it is, and nowhere else. An integer step is as wide for a small
value as for a large one, which is why scales are fine here where fp8 needs only coarse ones.
"""

from __future__ import annotations

import torch

from kvstore.base import ChunkShape
from kvstore.codecs.base import CodecFamily, bytes_of, check_chunk, check_payload, read_tensor

MAX_CODE = 127.0
LEAST_SCALE = 2.0**-100  # what is smaller than that is zero to any model


class Int8Codec:
    """Scales of keys, float32 [layers, kv_heads, head_dim], and of values, [layers, tokens, kv_heads], then codes.

    Codes lie as the chunk does, [layers, tokens, 2, kv_heads, head_dim], a byte each. The error is at most half a
    scale, besides the dtype's own rounding. Finite values stay finite. Chunks with infinities, NaN or values beyond
    half the dtype's range are refused, not carried: `encode` raises, and the chunk is not stored under this codec.
    """

    name = "int8"
    number = 3
    lossless = False

    def max_bytes(self, shape: ChunkShape) -> int:
        """Return bytes of every encoded chunk of this shape."""
        return sum(_scale_bytes(shape)) + shape.raw_bytes // shape.dtype.itemsize

    @torch.inference_mode()
    def encode(self, kv: torch.Tensor, shape: ChunkShape) -> memoryview:
        """Encode kv [layers, tokens, 2, kv_heads, head_dim].

        Raises:
            ValueError: kv is not such a chunk, or holds what this codec refuses.
        """
        check_chunk(kv, shape)
        wide = kv.float() if kv.dtype != torch.float32 else kv.clone()
        largest = [_largest(wide[:, :, 0], dim=1), _largest(wide[:, :, 1], dim=3)]
        if not all(bool((one <= torch.finfo(shape.dtype).max / 2).all()) for one in largest):
            raise ValueError("int8 takes finite values only")
        value = torch.empty(self.max_bytes(shape), dtype=torch.uint8)
        end = 0
        for half, one in enumerate(largest):
            one.div_(MAX_CODE).clamp_(min=LEAST_SCALE)
            wide[:, :, half].div_(one)
            start, end = end, end + one.numel() * 4
            value[start:end].view(torch.float32).copy_(one.view(-1))
        # division may leave a last bit above 127; rounding takes it away
        value[end:].view(torch.int8).view(shape.size).copy_(wide.round_())
        return bytes_of(value)

    @torch.inference_mode()
    def decode(self, payload: memoryview, shape: ChunkShape, out: torch.Tensor) -> None:
        """Decode into `out`.

        Raises:
            ValueError: the payload is not of this codec and shape, or `out` is not such a chunk.
        """
        check_chunk(out, shape)
        check_payload(payload, self.max_bytes(shape))
        of_keys, of_values = _scale_bytes(shape)
        scales = read_tensor(payload[: of_keys + of_values], torch.float32)
        if not bool(torch.isfinite(scales).all()):
            raise ValueError("broken scales")
        wide = read_tensor(payload[of_keys + of_values :], torch.int8).view(shape.size).float()
        wide[:, :, 0].mul_(scales[: of_keys // 4].view(shape.layers, 1, shape.kv_heads, shape.head_dim))
        wide[:, :, 1].mul_(scales[of_keys // 4 :].view(shape.layers, shape.tokens, shape.kv_heads, 1))
        out.copy_(wide)


def _largest(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Return largest magnitude along `dim`, which is kept; NaN and infinities show in it."""
    return torch.maximum(values.amax(dim, keepdim=True), -values.amin(dim, keepdim=True))


def _scale_bytes(shape: ChunkShape) -> tuple[int, int]:
    """Return the bytes of the scales of keys and of values."""
    return shape.layers * shape.kv_heads * shape.head_dim * 4, shape.layers * shape.tokens * shape.kv_heads * 4


PART = CodecFamily({Int8Codec.name: Int8Codec.number}, lambda name, profiles: Int8Codec())
