"""Eight-bit floating point (e4m3): half the bytes of bf16, three bits of mantissa.

One scale serves a (layer, K|V, head) of the chunk. It is a power of two: in a floating-point format a scale only
places the range, so a finer one would gain nothing, and this one rounds nothing. What lies in the upper 14 powers of
two below the largest value keeps a relative error of at most 1/16; smaller values keep the absolute error of those.
"""

from __future__ import annotations

import torch

from kvstore.base import ChunkShape
from kvstore.codecs.base import CodecFamily, bytes_of, check_chunk, check_payload, read_tensor

MAX_CODE = 448.0  # the largest e4m3 number; there is no infinity beyond it
LEAST_EXPONENT = -100  # of a scale: what is smaller than that is zero to any model


class Fp8Codec:
    """Scales float32 [layers, 2, kv_heads], then codes [layers, tokens, 2, kv_heads, head_dim], a byte each.

    Finite values stay finite. Chunks with infinities, NaN or values beyond half the dtype's range are refused, not
    carried: `encode` raises, and the chunk is not stored under this codec.
    """

    name = "fp8"
    number = 2
    lossless = False

    def max_bytes(self, shape: ChunkShape) -> int:
        """Return bytes of every encoded chunk of this shape."""
        return _scale_bytes(shape) + shape.raw_bytes // shape.dtype.itemsize

    @torch.inference_mode()
    def encode(self, kv: torch.Tensor, shape: ChunkShape) -> memoryview:
        """Encode kv [layers, tokens, 2, kv_heads, head_dim].

        Raises:
            ValueError: kv is not such a chunk, or holds what this codec refuses.
        """
        check_chunk(kv, shape)
        wide = kv.float()  # kv itself where that is its dtype: not to be written
        # [layers, 2, kv_heads]; NaN and infinities show in it
        most = torch.maximum(wide.amax(dim=(1, 4)), -wide.amin(dim=(1, 4)))
        if not bool((most <= torch.finfo(shape.dtype).max / 2).all()):
            raise ValueError("fp8 takes finite values only")
        exponents = torch.frexp(most / MAX_CODE).exponent.clamp_(min=LEAST_EXPONENT)
        scales = torch.ldexp(torch.ones_like(most), exponents)
        value = torch.empty(self.max_bytes(shape), dtype=torch.uint8)
        value[: _scale_bytes(shape)].view(torch.float32).copy_(scales.view(-1))
        codes = value[_scale_bytes(shape) :].view(torch.float8_e4m3fn).view(shape.size)
        codes.copy_(wide * scales.reciprocal()[:, None, :, :, None])
        return bytes_of(value)

    @torch.inference_mode()
    def decode(self, payload: memoryview, shape: ChunkShape, out: torch.Tensor) -> None:
        """Decode into `out`.

        Raises:
            ValueError: the payload is not of this codec and shape, or `out` is not such a chunk.
        """
        check_chunk(out, shape)
        check_payload(payload, self.max_bytes(shape))
        scales = read_tensor(payload[: _scale_bytes(shape)], torch.float32).view(shape.layers, 1, 2, shape.kv_heads, 1)
        if not bool(torch.isfinite(scales).all()):
            raise ValueError("broken scales")
        halves = _as_half(read_tensor(payload[_scale_bytes(shape) :], torch.int8)).view(shape.size)
        out.copy_(halves.float().mul_(scales * 256.0))


def _as_half(codes: torch.Tensor) -> torch.Tensor:
    """View e4m3 codes (int8) as float16 numbers of 1/256 of their value: the same bits, three places to the left.

    float16 has one more bit of exponent with a bias larger by 8, and its subnormals line up. This is several times
    faster than torch's own conversion of float8 on CPUs.
    """
    return codes.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4001).view(torch.float16)


def _scale_bytes(shape: ChunkShape) -> int:
    return shape.layers * 2 * shape.kv_heads * 4


PART = CodecFamily({Fp8Codec.name: Fp8Codec.number}, lambda name, profiles: Fp8Codec())
