"""Conversion of one model's chunks to values and back: keys, codecs, layer groups, staging memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import torch

from kvstore.base import Codec
from kvstore.codecs.base import filled_up, landing, load_codec
from kvstore.keys import Chain, Keyring, Link, fingerprint, redis_key
from kvstore.layout import choose_chunk_tokens, layer_groups
from kvstore.lookup.memory import EXACT
from kvstore.types import ModelLayout
from kvstore.value import OVERHEAD_BYTES, encoding_name, open_into, seal
from turnout.errors import invalid
from turnout.types import Sharing

BUFFERS_KEPT = 8


class BufferPool:
    """Buffers for values on their way, used again and again. Any thread may call."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._free: list[bytearray] = []
        self._lock = Lock()

    def take(self) -> bytearray:
        """Return a buffer of `num_bytes`."""
        with self._lock:
            return self._free.pop() if self._free else bytearray(self.num_bytes)

    def give(self, buffer: bytearray) -> None:
        """Take a buffer back."""
        with self._lock:
            if len(self._free) < BUFFERS_KEPT:
                self._free.append(buffer)


@dataclass(frozen=True, slots=True)
class Encoding:
    """A codec as the store uses it.

    Attributes:
        codec: itself.
        name: in keys.
        quality: what chunks that came through it are called in the host tier.
        sizes: longest value of each group of a chunk, bytes.
    """

    codec: Codec
    name: str
    quality: str
    sizes: tuple[int, ...]

    @property
    def most_bytes(self) -> int:
        """Of a chunk's values together."""
        return sum(self.sizes)


class Encodings:
    """Chunks of one model as values.

    Args:
        keyring: the store's keys.
        layout: of the model.
        codecs: names, as configured.
        chunk_tokens: of a chunk; None: chosen for the model.

    Attributes:
        all: lossless codecs first, then as configured.
        groups: shapes of a chunk's values.

    Raises:
        TurnoutError: a codec or the chunk's length is refused.
    """

    def __init__(
        self, keyring: Keyring, layout: ModelLayout, codecs: Sequence[str], chunk_tokens: int | None = None
    ) -> None:
        self.keyring = keyring
        self.layout = layout
        self.chunk_tokens = choose_chunk_tokens(layout, chunk_tokens)
        self.fingerprint = fingerprint({**layout.fingerprint_parts, "chunk_tokens": self.chunk_tokens})
        self.groups = layer_groups(layout, self.chunk_tokens)
        loaded = [load_codec(name, layout.profiles) for name in dict.fromkeys(codecs)]
        if layout.dtype == torch.int8 and (lossy := [codec.name for codec in loaded if not codec.lossless]):
            message = f"{', '.join(lossy)}: a model with kv_dtype int8 is stored exactly; allowed with it: raw"
            raise invalid("kvstore.codecs", message)
        self.all = [self._encoding(codec) for codec in sorted(loaded, key=lambda codec: not codec.lossless)]
        self.buffers = BufferPool(max((size for encoding in self.all for size in encoding.sizes), default=0))

    @property
    def chunk_size(self) -> tuple[int, int, int, int, int]:
        """[layers, chunk_tokens, 2, kv_heads, head_dim]."""
        return self.layout.layers, self.chunk_tokens, 2, self.layout.kv_heads, self.layout.head_dim

    @property
    def raw_bytes(self) -> int:
        """Of a chunk's tensor."""
        return self.chunk_tokens * self.layout.token_bytes

    def chain(self, sharing: Sharing, rope_length: int = 0) -> Chain:
        """Begin the digests of a sequence; see `kvstore.keys.Chain`."""
        return Chain(self.keyring, self.fingerprint, self.chunk_tokens, sharing, rope_length)

    def readable(self, lossy: bool) -> list[Encoding]:
        """List the encodings that a request of the quality class may read, best first."""
        return [encoding for encoding in self.all if lossy or encoding.codec.lossless]

    def keys(self, link: Link, encoding: Encoding) -> list[bytes]:
        """List the keys of a chunk's values, group by group."""
        return [redis_key(self.keyring, self.fingerprint, link, encoding.name, i) for i in range(len(self.groups))]

    def entries(self, link: Link) -> list[tuple[bytes, int]]:
        """List a chunk's values in every encoding: the key of each, and its bytes at most."""
        return [entry for encoding in self.all for entry in zip(self.keys(link, encoding), encoding.sizes, strict=True)]

    def empty_chunk(self) -> torch.Tensor:
        """Allocate a chunk."""
        return torch.empty(self.chunk_size, dtype=self.layout.dtype)

    def part(self, kv: torch.Tensor, group: int) -> torch.Tensor:
        """Return the layers of one value, a view."""
        shape = self.groups[group]
        return kv[shape.first_layer : shape.first_layer + shape.layers]

    def open(self, link: Link, encoding: Encoding, group: int, value: memoryview, kv: torch.Tensor) -> None:
        """Check a value, decrypt and decode it into its layers of `kv`.

        Raises:
            ValueRefused: it is not what was written under this key.
            ValueError: it is, but the codec cannot read it.
        """
        shape, out = self.groups[group], self.part(kv, group)
        key = redis_key(self.keyring, self.fingerprint, link, encoding.name, group)
        buffer = self.buffers.take()
        try:
            room = landing(encoding.codec, shape, out, memoryview(buffer))
            length = open_into(self.keyring, link.namespace, key, encoding.codec, shape, value, room)
            encoding.codec.decode(room[:length], shape, out)
        finally:
            self.buffers.give(buffer)

    def close(self, link: Link, encoding: Encoding, group: int, kv: torch.Tensor, buffer: bytearray) -> memoryview:
        """Encode and encrypt the layers of one value; the result lies in `buffer`.

        Raises:
            ValueError: the codec refuses what `kv` holds.
        """
        shape = self.groups[group]
        key = redis_key(self.keyring, self.fingerprint, link, encoding.name, group)
        payload = filled_up(encoding.codec, shape, encoding.codec.encode(self.part(kv, group), shape))
        return seal(self.keyring, link, key, encoding.codec, shape, payload, memoryview(buffer))

    def _encoding(self, codec: Codec) -> Encoding:
        sizes = tuple(codec.max_bytes(shape) + OVERHEAD_BYTES for shape in self.groups)
        return Encoding(codec, encoding_name(codec), EXACT if codec.lossless else codec.name, sizes)
