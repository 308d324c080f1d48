"""How a model's cache is cut: tokens in a chunk, layers in a value."""

from __future__ import annotations

from kvstore.base import ChunkShape
from kvstore.types import ModelLayout
from turnout.errors import invalid

VALUE_BYTES = 1 << 20  # read fastest (measured: values that leave the cache are slower)
MAX_VALUE_BYTES = 2 << 20
MAX_CHUNK_TOKENS = 256


def choose_chunk_tokens(layout: ModelLayout, wanted: int | None = None) -> int:
    """Choose the tokens in a chunk: whole blocks, about 1 MiB, unless the configuration has a number.

    Raises:
        TurnoutError: what is wanted is not a power of two times the engine's block, or is too long.
    """
    block = layout.block_size
    sizes = [block << power for power in range(9) if block << power <= max(MAX_CHUNK_TOKENS, block)]
    if wanted is not None:
        if wanted not in sizes:
            raise invalid("kvstore.chunk_tokens", f"must be one of {', '.join(map(str, sizes))} (got {wanted})")
        return wanted
    return max((size for size in sizes if size * layout.token_bytes <= VALUE_BYTES), default=block)


def layer_groups(layout: ModelLayout, chunk_tokens: int) -> tuple[ChunkShape, ...]:
    """Split the layers of a chunk into values: one, or as few equal groups as keep each below 2 MiB."""
    layer_bytes = chunk_tokens * layout.token_bytes // layout.layers
    most = max(1, MAX_VALUE_BYTES // layer_bytes)
    count = -(-layout.layers // most)
    each = -(-layout.layers // count)
    heads, width, dtype = layout.kv_heads, layout.head_dim, layout.dtype
    return tuple(
        ChunkShape(first, min(each, layout.layers - first), chunk_tokens, heads, width, dtype)
        for first in range(0, layout.layers, each)
    )
