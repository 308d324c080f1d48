"""Interfaces of the store: byte stores and codecs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch  # not loaded to start or check a server

FaultKind = Literal["unreachable", "late", "refused", "broken", "open"]


class StoreFault(Exception):  # noqa: N818  (a fault is a miss, not an error)
    """Failure of a store operation; the caller continues without the store.

    Args:
        kind: unreachable (no connection), late (a deadline passed), refused (the server said no: memory, rights),
            broken (an answer that no server gives), open (the breaker lets nothing through).
        message: for the log; holds no key, value or password.
    """

    def __init__(self, kind: FaultKind, message: str) -> None:
        super().__init__(message)
        self.kind: FaultKind = kind


class ByteStore(Protocol):
    """Keys and values of bytes, in Redis or a fake. Calls block, come from any thread, and end by their deadline.

    Every method raises `StoreFault`; `deadline` is a time of `time.monotonic()`.
    """

    def count_prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """Count the keys that are there, from the first on without a gap (one round trip per node)."""
        ...

    def read(
        self,
        keys: Sequence[bytes],
        place: Callable[[int, int], memoryview | None],
        done: Callable[[int], bool],
        ttl_ms: int,
        deadline: float,
    ) -> int:
        """Read values in order, pipelined, and make each live `ttl_ms` more.

        Args:
            keys: of the values.
            place: (index, its bytes) -> where it goes, writable and of that length; None: it is not wanted.
            done: called when value `index` is complete; False: read no more.
            ttl_ms: life of what was read, in milliseconds from now.
            deadline: when to stop.

        Returns:
            How many values were read: reading stops at the first that is missing, at what `done` or `place` refused,
            and at the deadline. What came before a fault counts; a fault before the first value is raised.
        """
        ...

    def write(self, key: bytes, parts: Sequence[memoryview | bytes], ttl_ms: int, deadline: float) -> bool:
        """Set a value, the parts one after another, unless the key is there; whether it was set."""
        ...

    def touch(self, keys: Sequence[bytes], ttl_ms: int | None, deadline: float) -> list[bool]:
        """Make keys live `ttl_ms` from now (None: for ever); for each, whether it was there."""
        ...

    def delete(self, keys: Sequence[bytes], deadline: float) -> int:
        """Remove keys; how many there were. Where not every node answered, that is a fault: some may be left."""
        ...

    def script(self, text: str, keys: Sequence[bytes], args: Sequence[bytes | int | str], deadline: float) -> Any:
        """Run a small Lua script on the node that holds the keys (one slot); what it returns."""
        ...

    def servers(self, deadline: float) -> list[str]:
        """Name the servers that are known and answer, as in "valkey 9.1.2 (embedded)"."""
        ...

    def reset_connections(self) -> None:
        """Replace all connections: a value was not that of its key, so one of them may be a reply behind."""
        ...

    def health(self) -> Literal["ok", "degraded", "off"]:
        """Return ok; degraded: some node's breaker is open; or off: nothing can be reached."""
        ...

    def close(self) -> None:
        """Close connections; calls in progress end with a fault."""
        ...


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """Keys and values of some layers over some tokens: [layers, tokens, 2, kv_heads, head_dim].

    Attributes:
        first_layer: index of the first of these layers in the model.
        layers: how many.
        tokens: of the chunk.
        kv_heads: key/value heads.
        head_dim: width of a head.
        dtype: of the model's cache.
    """

    first_layer: int
    layers: int
    tokens: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def size(self) -> tuple[int, int, int, int, int]:
        """[layers, tokens, 2, kv_heads, head_dim]."""
        return self.layers, self.tokens, 2, self.kv_heads, self.head_dim

    @property
    def raw_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.layers * self.tokens * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


class Codec(Protocol):
    """Encoding of chunks as bytes, and back. Pure functions of their arguments; called from several threads.

    One that needs the very profile it encoded with to decode has that one's version, bytes, as `profile_version`. One
    whose payloads differ in length for chunks of a shape has `usual_bytes(shape)`, which nearly none exceeds, and
    passes over zeros at the end.

    Attributes:
        name: in configuration and keys; letters, digits and dashes.
        number: in headers, 0 to 255, never used again for another format.
        lossless: whether what comes back is what went in, bit for bit.
    """

    name: str
    number: int
    lossless: bool

    def encode(self, kv: torch.Tensor, shape: ChunkShape) -> memoryview:
        """Encode kv [layers, tokens, 2, kv_heads, head_dim] (CPU, contiguous); the view may alias kv's memory."""
        ...

    def max_bytes(self, shape: ChunkShape) -> int:
        """Return most bytes an encoded chunk of this shape takes."""
        ...

    def decode(self, payload: memoryview, shape: ChunkShape, out: torch.Tensor) -> None:
        """Decode into `out` (CPU, contiguous, the chunk's shape and dtype).

        Raises:
            ValueError: the payload is not of this codec and shape.
        """
        ...
