"""Tokens stored as differences to a neighbour, quantised by depth and entropy-coded (paper #238, CacheGen: Fast Context
Loading for Language Model Applications).

Tokens come in groups of ten. The first of a group, its anchor, is quantised with 8 bits over the range its channel has;
of the others, the difference to what the anchor foretells is, with steps that grow with the depth of the layer (half a
step in the first third, one and a half in the last: errors of early layers go through all that follow), and are finer
for keys, whose errors change what is attended to, than for values. A group needs no other. The symbols are
entropy-coded with one table for each layer, side (keys or values) and channel, for anchors and for differences; the
tables come from a profile of the model. The codecs cachegen-0 to cachegen-3 differ in the step, and each doubles the
one before it.

The paper takes the anchor itself for the tokens after it, which pays where neighbours are alike. In a channel where
they are not, differences vary more than the values. Here a token is foretold by weight * anchor + shift, fitted channel
by channel in the profile: with weight 1 that is the paper's difference, with weight 0 the value itself, and what is
left never varies more than either.

What lies beyond the range of its table (a token that draws all attention, an infinity) is kept outside the streams, bit
for bit: an unusual chunk takes more bytes and is no worse for it. One that would take more than the tensor is
stored as the tensor.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvstore.base import ChunkShape
from kvstore.codecs import _coder
from kvstore.codecs.base import CodecFamily, bytes_of, check_chunk, read_tensor
from kvstore.profiles import Ints, Profile, check_fits, refuse_missing

PAPERS = (238,)
GROUP = 10
# A step in standard deviations of what is coded, times what its layer and side have.
LEVELS = {"cachegen-0": 0.4, "cachegen-1": 0.8, "cachegen-2": 1.6, "cachegen-3": 3.2}
DEPTHS = (0.5, 1.0, 1.5)  # each third of the layers
SIDES = (0.5, 1.5)  # keys and values: at equal bytes this halves the divergence of the demo pair and more
ANCHOR_STEPS = 255
SPAN = 6.0  # standard deviations to each side that the histogram of differences covers

# A chunk of what its model usually reads takes 0.95 to 1.03 times the bytes that its tables expect, header and all.
USUAL = 1.03

_HEADER = struct.Struct("<6sB1xI")  # version of the profile, whether it is coded, elements kept as they were
_STORED, _CODED = 0, 1


@dataclass(frozen=True, slots=True)
class Grid:
    """Quantisation grid of some layers: float32 [layers, 2, channels, 1], `most` [layers, 2, 1, 1]."""

    low: torch.Tensor
    step: torch.Tensor
    weight: torch.Tensor
    shift: torch.Tensor
    bin: torch.Tensor
    most: torch.Tensor

    def foretold(self, anchors: torch.Tensor) -> torch.Tensor:
        """Predict the other tokens of a group, given its anchor."""
        return anchors.mul(self.weight).add_(self.shift)


@dataclass(frozen=True, slots=True)
class Side:
    """Tables of keys or values of a layer, one a channel."""

    anchors: list[_coder.Table]
    differences: list[_coder.Table]


class CacheGenCodec:
    """A header, the length of each stream (uint32, in words), the streams (uint32), one for each layer and side, then
    where elements were kept (uint32, in the order [layers, 2, channels, tokens]) and these elements. Zeros may follow.

    Args:
        name: one of `LEVELS`.
        profile: of the model, float32 [layers, 2, channels] each: `low` and `high`, the range of anchors; `weight` and
            `shift`, which foretell a token from its anchor; `spread`, the standard deviation of what is left. And
            uint8 [layers, 2, channels, cells]: `anchors` and `differences`, histograms of them.
    """

    lossless = False

    def __init__(self, name: str, profile: Profile) -> None:
        self.name = name
        self.number = NUMBERS[name]
        self.profile_version = profile.version
        self._profile = profile
        self._scale = LEVELS[name]
        self._sides: dict[tuple[int, int], Side] = {}  # made when first needed; two threads make the same
        self._bits: dict[tuple[int, int], tuple[float, float]] = {}  # likewise

    def max_bytes(self, shape: ChunkShape) -> int:
        """Return the bytes of a chunk stored as it is."""
        return _HEADER.size + shape.raw_bytes

    def usual_bytes(self, shape: ChunkShape) -> int:
        """Return a size that nearly no chunk of tokens such as the profile's exceeds.

        Raises:
            ValueError: the shape is not of the profile's model.
        """
        self._check(shape)
        num_anchors = -(-shape.tokens // GROUP)
        bits = 0.0
        for layer in range(shape.first_layer, shape.first_layer + shape.layers):
            for side in range(2):
                anchor, difference = self._expected_bits(layer, side)
                bits += anchor * num_anchors + difference * (shape.tokens - num_anchors)
        return min(math.ceil(USUAL * bits / 8), self.max_bytes(shape))

    def encode(self, kv: torch.Tensor, shape: ChunkShape) -> memoryview:
        """Encode kv [layers, tokens, 2, kv_heads, head_dim].

        Raises:
            ValueError: kv is no such chunk, or not of the profile's model.
        """
        check_chunk(kv, shape)
        self._check(shape)
        values = _by_channel(kv.detach(), shape)
        anchors, differences, kept = self._symbols(values.float(), shape)
        streams = [
            _coder.encode([(differences[place], side.differences), (anchors[place], side.anchors)])
            for place, side in self._tables(shape)
        ]
        positions = kept.view(-1).nonzero().view(-1).numpy().astype("<u4")
        parts: list[bytes | memoryview] = [
            _HEADER.pack(self._profile.version, _CODED, len(positions)),
            np.array([len(stream) for stream in streams], "<u4").tobytes(),
            *(stream.astype("<u4", copy=False).tobytes() for stream in streams),
            positions.tobytes(),
            bytes_of(values[kept].contiguous()),
        ]
        if sum(map(len, parts)) > self.max_bytes(shape):
            parts = [_HEADER.pack(self._profile.version, _STORED, 0), bytes_of(kv)]
        return memoryview(b"".join(parts))

    def decode(self, payload: memoryview, shape: ChunkShape, out: torch.Tensor) -> None:
        """Decode into `out`.

        Raises:
            ValueError: the payload is not of this codec, profile and shape, or `out` is not such a chunk.
        """
        check_chunk(out, shape)
        self._check(shape)
        if payload.nbytes < _HEADER.size:
            raise ValueError("a payload shorter than its header")
        version, mode, num_kept = _HEADER.unpack_from(payload)
        if version != self._profile.version:
            raise ValueError("encoded with another profile")
        body = payload[_HEADER.size :]
        if mode == _STORED:
            out.view(-1).view(torch.uint8).copy_(read_tensor(_cut(body, shape.raw_bytes), torch.uint8))
        elif mode == _CODED:
            self._decode(body, shape, num_kept, out)
        else:
            raise ValueError(f"mode {mode} is not known")

    def _decode(self, body: memoryview, shape: ChunkShape, num_kept: int, out: torch.Tensor) -> None:
        num_streams = 2 * shape.layers
        words = np.frombuffer(body[: body.nbytes // 4 * 4], "<u4")
        ends = num_streams + np.cumsum(words[:num_streams], dtype=np.int64)
        tail = num_kept * (4 + shape.dtype.itemsize)
        if len(ends) < num_streams:
            raise ValueError("a payload of less than the lengths of its streams")
        body = _cut(body, 4 * int(ends[-1]) + tail)
        positions = words[ends[-1] : ends[-1] + num_kept].astype(np.int64)
        if num_kept and int(positions.max()) >= out.numel():
            raise ValueError("an element beyond the chunk")
        symbols = _empty_symbols(shape)
        anchors, differences = symbols
        for (place, side), end, count in zip(self._tables(shape), ends, words[:num_streams], strict=True):
            stream = words[end - count : end].astype(np.uint32)
            _coder.decode(stream, [(differences[place], side.differences), (anchors[place], side.anchors)])
        channels = _by_channel(out, shape)
        channels.copy_(self._values(torch.from_numpy(anchors), torch.from_numpy(differences), shape))
        if num_kept:
            kept = read_tensor(body[body.nbytes - num_kept * shape.dtype.itemsize :], shape.dtype)
            channels[torch.unravel_index(torch.from_numpy(positions), channels.shape)] = kept

    def _symbols(self, values: torch.Tensor, shape: ChunkShape) -> tuple[_coder.Symbols, _coder.Symbols, torch.Tensor]:
        """Return symbols of anchors and differences, and which of values [layers, 2, channels, tokens] have none."""
        grid, kept = self._grid(shape), torch.zeros(values.shape, dtype=torch.bool)
        inner, anchor_of = _inner(shape.tokens)
        anchors, kept[..., ::GROUP] = _nearest(
            values[..., ::GROUP].sub(grid.low).div_(grid.step), torch.zeros(1), torch.full((1,), ANCHOR_STEPS)
        )
        base = grid.foretold(anchors.mul(grid.step).add_(grid.low)).index_select(-1, anchor_of)
        differences, outside = _nearest(values.index_select(-1, inner).sub_(base).div_(grid.bin), -grid.most, grid.most)
        kept.index_copy_(-1, inner, outside)
        return anchors.int().numpy(), differences.add_(grid.most).int().numpy(), kept

    def _values(self, anchors: torch.Tensor, differences: torch.Tensor, shape: ChunkShape) -> torch.Tensor:
        """Return the values of symbols, float32 [layers, 2, channels, tokens]."""
        grid = self._grid(shape)
        inner, anchor_of = _inner(shape.tokens)
        first = anchors.float().mul_(grid.step).add_(grid.low)
        values = torch.empty((*first.shape[:-1], shape.tokens))
        values[..., ::GROUP] = first
        others = (
            differences.float().sub_(grid.most).mul_(grid.bin).add_(grid.foretold(first).index_select(-1, anchor_of))
        )
        return values.index_copy_(-1, inner, others)

    def _check(self, shape: ChunkShape) -> None:
        check_fits(self._profile, shape, self._profile.tensors)

    def _grid(self, shape: ChunkShape) -> Grid:
        layers = range(shape.first_layer, shape.first_layer + shape.layers)
        tensors = {
            name: self._profile.tensors[name][layers.start : layers.stop]
            for name in ("low", "high", "weight", "shift", "spread")
        }
        bins = torch.tensor([[self.bin(layer, side) for side in range(2)] for layer in layers])
        most = torch.tensor([[float(self._most(layer, side)) for side in range(2)] for layer in layers])
        return Grid(
            low=tensors["low"][..., None],
            step=((tensors["high"] - tensors["low"]) / ANCHOR_STEPS)[..., None],
            weight=tensors["weight"][..., None],
            shift=tensors["shift"][..., None],
            bin=(tensors["spread"] * bins[..., None])[..., None],
            most=most[..., None, None],
        )

    def bin(self, layer: int, side: int) -> float:
        """Return step of the differences of a layer's keys (0) or values, in their standard deviations."""
        return self._scale * DEPTHS[layer * len(DEPTHS) // self._profile.layers] * SIDES[side]

    def _most(self, layer: int, side: int) -> int:
        """Return largest symbol of a difference."""
        return math.ceil(SPAN / self.bin(layer, side))

    def _tables(self, shape: ChunkShape) -> list[tuple[tuple[int, int], Side]]:
        """Return place in a chunk's arrays, and tables, of every layer and side."""
        return [
            ((layer, side), self._side(shape.first_layer + layer, side))
            for layer in range(shape.layers)
            for side in range(2)
        ]

    def _side(self, layer: int, side: int) -> Side:
        known = self._sides.get((layer, side))
        if known is None:
            known = self._sides[layer, side] = Side(*map(_coder.make_tables, self.weights(layer, side)))
        return known

    def _expected_bits(self, layer: int, side: int) -> tuple[float, float]:
        """Return the entropies of an anchor and of a difference in all channels of a layer's keys (0) or values."""
        known = self._bits.get((layer, side))
        if known is None:
            anchors, differences = map(_coder.entropy_bits, self.weights(layer, side))
            known = self._bits[layer, side] = (anchors, differences)
        return known

    def weights(self, layer: int, side: int) -> tuple[Ints, Ints]:
        """Return weights of symbols of anchors and of differences, int64 [channels, symbols], of keys (0) or values."""
        anchors, differences = (self._profile.tensors[name][layer, side].numpy() for name in ("anchors", "differences"))
        cells = anchors.shape[1] * _coder.FINE
        at = np.arange(ANCHOR_STEPS + 2) - 0.5
        edges = np.rint(at * (cells / ANCHOR_STEPS)).astype(np.int64)
        first = _coder.symbol_weights(anchors, np.broadcast_to(edges, (len(anchors), len(edges))))
        cells = differences.shape[1] * _coder.FINE
        most = self._most(layer, side)
        at = np.arange(-most, most + 2) - 0.5
        edges = np.rint((at * self.bin(layer, side) + SPAN) * (cells / (2 * SPAN))).astype(np.int64)
        return first, _coder.symbol_weights(differences, np.broadcast_to(edges, (len(differences), len(edges))))


def _cut(body: memoryview, num_bytes: int) -> memoryview:
    """Return the first bytes of a payload, of which only zeros may follow.

    Raises:
        ValueError: there are fewer, or something else follows.
    """
    rest = bytes(body[num_bytes:])
    if body.nbytes < num_bytes or rest.count(0) != len(rest):
        raise ValueError("a payload of another length than what it holds")
    return body[:num_bytes]


def _by_channel(kv: torch.Tensor, shape: ChunkShape) -> torch.Tensor:
    """Return a view of a chunk as [layers, 2, channels, tokens]."""
    return kv.view(shape.layers, shape.tokens, 2, shape.kv_heads * shape.head_dim).permute(0, 2, 3, 1)


def _inner(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices of the tokens that are no anchors, and the number of each one's anchor."""
    at = torch.arange(tokens)
    inner = at[at % GROUP != 0]
    return inner, inner // GROUP


def _nearest(steps: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to whole numbers within bounds, and mark where none is near: too far out, or no number at all."""
    whole = steps.round_()
    inside = whole.nan_to_num(0.0).clamp_(low, high)
    return inside, inside != whole


def _empty_symbols(shape: ChunkShape) -> tuple[_coder.Symbols, _coder.Symbols]:
    num_anchors = -(-shape.tokens // GROUP)
    size = (shape.layers, 2, shape.kv_heads * shape.head_dim)
    return np.empty((*size, num_anchors), np.int32), np.empty((*size, shape.tokens - num_anchors), np.int32)


def _make(name: str, profiles: Mapping[str, Any]) -> CacheGenCodec:
    profile = profiles.get("cachegen")
    if profile is None:
        raise refuse_missing(name)
    return CacheGenCodec(name, profile)


NUMBERS = {name: 32 + level for level, name in enumerate(LEVELS)}
PART = CodecFamily(NUMBERS, _make)
