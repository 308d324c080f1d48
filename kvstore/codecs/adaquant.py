"""Keys get more bits than values (paper #12, More for Keys, Less for Values: Adaptive KV Cache Quantization).

Groups of 64 elements have a scale and a zero of their own, and codes of 2, 3, 4 or 8 bits, really packed. Keys are
grouped along the tokens of a channel, because a few of their channels are large at every token; values along the
channels of a token, because what is large in them is a token (KIVI, arXiv 2402.02750). Chunks of fewer than 64 tokens
put neighbouring channels of the keys into one group, so that scales cost the same half bit everywhere.

How many bits each side gets follows from the norms: quantised to b bits, the squared error of X is about
c |X|^2 4^-b, so that with b_K + b_V fixed the sum of both is least where b_K - b_V = log2(|K| / |V|), norms being
Frobenius norms, layer by layer. Without a profile of the model, keys get 4 bits and values 2.

The paper keeps the newest tokens in full precision. Here the reader does, for every lossy codec: the end of a prompt
is computed (`kvstore.residual_tokens`), and what is computed after what was read stays in the engine's pool as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kvstore.base import ChunkShape
from kvstore.codecs._packing import WIDTHS, pack, packed_bytes, unpack
from kvstore.codecs.base import CodecFamily, bytes_of, check_chunk, check_payload, read_tensor
from kvstore.profiles import Profile

PAPERS = (12,)
GROUP = 64
BUDGET = 3.0  # bits of an element on the average of keys and values, scales apart
SCALE_BYTES = 4  # of a group: scale and zero, float16 each
Widths = tuple[int, int]  # bits of a key's and of a value's element
PRESETS: dict[str, Widths] = {"adaquant-k4v2": (4, 2), "adaquant-k2v4": (2, 4), "adaquant-k8v4": (8, 4)}


def choose_widths(key_norm: float, value_norm: float, budget: float = BUDGET) -> Widths:
    """Choose the bits for keys and values of a layer: least error among the pairs that use most of 2 * budget.

    Args:
        key_norm: Frobenius norm of the layer's keys.
        value_norm: of its values, over as many elements.
        budget: mean bits of an element, at least 2.
    """
    pairs = [(k, v) for k in WIDTHS for v in WIDTHS if k + v <= 2 * budget]
    spent = max(k + v for k, v in pairs)
    best = [pair for pair in pairs if sum(pair) == spent]
    return min(best, key=lambda pair: key_norm**2 * 4.0 ** -pair[0] + value_norm**2 * 4.0 ** -pair[1])


def quantise(groups: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of groups by even steps between each one's least and largest element.

    Args:
        groups: float32 [n, elements].
        bits: of a code.

    Returns:
        Codes uint8 [n, elements], and scale and zero float16 [n, 2]: an element is about code * scale + zero.
    """
    top = (1 << bits) - 1
    low, high = groups.amin(1), groups.amax(1)
    zero = low.half().float()  # what is stored: codes make up for its rounding
    scale = ((high - zero) / top).half().float()
    steps = torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = groups.sub(zero[:, None]).div_(steps[:, None]).round_().clamp_(0, top).to(torch.uint8)
    return codes, torch.stack([scale, zero], 1).half()


class AdaQuantCodec:
    """Widths of keys and values, a byte each, for every layer; then for every layer keys and values in turn.

    Of either: scale and zero float16 [groups, 2], then packed codes. Finite values stay finite. Chunks with
    infinities, NaN or values beyond float16 are refused, not carried: `encode` raises, and the chunk is not stored
    under this codec.

    Args:
        name: one of `NUMBERS`: a preset, or `adaquant` for widths by norm.
        profile: `norms` [layers, 2] of the model; None: `adaquant` is the preset K4V2.
    """

    lossless = False

    def __init__(self, name: str, profile: Profile | None = None) -> None:
        self.name = name
        self.number = NUMBERS[name]
        self._preset = PRESETS.get(name)
        self._norms = profile.tensors["norms"].double() if profile is not None else None

    def widths(self, layer: int) -> Widths:
        """Return bits of keys and values in a layer of the model.

        Raises:
            ValueError: the profile has no such layer.
        """
        if self._preset is not None or self._norms is None:
            return self._preset or PRESETS["adaquant-k4v2"]
        if layer >= len(self._norms):
            raise ValueError(f"profile of {len(self._norms)} layers, layer {layer} asked")
        return choose_widths(float(self._norms[layer, 0]), float(self._norms[layer, 1]))

    def max_bytes(self, shape: ChunkShape) -> int:
        """Return bytes of every encoded chunk of this shape: both widths always sum to the same."""
        bits = sum(self._preset) if self._preset is not None else int(2 * BUDGET)
        num = _elements(shape)
        return shape.layers * (2 + packed_bytes(num, bits) + 2 * num // GROUP * SCALE_BYTES)

    def encode(self, kv: torch.Tensor, shape: ChunkShape) -> memoryview:
        """Encode kv [layers, tokens, 2, kv_heads, head_dim].

        Raises:
            ValueError: kv is not such a chunk, or holds what this codec refuses.
        """
        check_chunk(kv, shape)
        widths = [self.widths(shape.first_layer + layer) for layer in range(shape.layers)]
        value = torch.empty(self.max_bytes(shape), dtype=torch.uint8)
        value[: 2 * shape.layers] = torch.tensor(widths, dtype=torch.uint8).view(-1)
        for layer, side, bits, start, end in _parts(shape, widths):
            codes, scales = quantise(_grouped(kv.detach()[layer, :, side], side), bits)
            if not bool(scales.isfinite().all()):
                raise ValueError("adaquant takes finite values within the range of float16 only")
            middle = start + scales.numel() * 2
            value[start:middle].copy_(scales.view(-1).view(torch.uint8))
            value[middle:end].copy_(pack(codes.view(-1), bits))
        return bytes_of(value)

    def decode(self, payload: memoryview, shape: ChunkShape, out: torch.Tensor) -> None:
        """Decode into `out`.

        Raises:
            ValueError: the payload is not of this codec and shape, or `out` is not such a chunk.
        """
        check_chunk(out, shape)
        check_payload(payload, self.max_bytes(shape))
        value = read_tensor(payload, torch.uint8)
        widths: list[Widths] = [(int(k), int(v)) for k, v in value[: 2 * shape.layers].view(-1, 2).tolist()]
        if not {bits for pair in widths for bits in pair} <= set(WIDTHS):
            raise ValueError("broken widths")
        parts = list(_parts(shape, widths))
        if parts[-1][-1] != len(value):
            raise ValueError("widths of another length")
        num = _elements(shape)
        for layer, side, bits, start, end in parts:
            middle = start + num // GROUP * SCALE_BYTES
            scales = value[start:middle].clone().view(torch.float16).view(-1, 2).float()
            if not bool(scales.isfinite().all()):
                raise ValueError("broken scales")
            wide = unpack(value[middle:end], num, bits).view(-1, GROUP).float()
            wide.mul_(scales[:, :1]).add_(scales[:, 1:])
            _ungroup(wide, out[layer, :, side], side)


def _elements(shape: ChunkShape) -> int:
    """Return the number of elements of the keys of a layer, made up to whole groups."""
    return -(-shape.tokens * shape.kv_heads * shape.head_dim // GROUP) * GROUP


def _parts(shape: ChunkShape, widths: list[Widths]) -> Iterator[tuple[int, int, int, int, int]]:
    """Return layer, side (0: keys), bits, and where in the payload it starts and ends."""
    num, start = _elements(shape), 2 * shape.layers
    for layer, pair in enumerate(widths):
        for side, bits in enumerate(pair):
            end = start + num // GROUP * SCALE_BYTES + packed_bytes(num, bits)
            yield layer, side, bits, start, end
            start = end


def _grouped(x: torch.Tensor, side: int) -> torch.Tensor:
    """Group x [tokens, kv_heads, head_dim] as float32 [groups, 64]; the last group repeats its last element."""
    flat = (x.permute(1, 2, 0) if side == 0 else x).float().reshape(-1)
    missing = -len(flat) % GROUP
    if missing:
        flat = torch.cat([flat, flat[-1:].expand(missing)])
    return flat.view(-1, GROUP)


def _ungroup(groups: torch.Tensor, out: torch.Tensor, side: int) -> None:
    """Undo `_grouped`, into out [tokens, kv_heads, head_dim]."""
    tokens, heads, width = out.shape
    flat = groups.view(-1)[: out.numel()]
    out.copy_(flat.view(heads, width, tokens).permute(2, 0, 1) if side == 0 else flat.view(tokens, heads, width))


def _make(name: str, profiles: Mapping[str, Any]) -> AdaQuantCodec:
    return AdaQuantCodec(name, profiles.get("adaquant"))


NUMBERS = {"adaquant": 16, "adaquant-k4v2": 17, "adaquant-k2v4": 18, "adaquant-k8v4": 19}
PART = CodecFamily(NUMBERS, _make)
