"""Small chunks and keys for the tests of the store."""

from __future__ import annotations

import torch

from kvstore.base import ChunkShape
from kvstore.keys import Chain, Keyring, Link, fingerprint
from turnout.types import Namespace, Sharing

ROOT = bytes(range(32))
MODEL = fingerprint({"weights": "a digest", "dtype": "float32", "chunk_tokens": 4})
ALICE = Namespace("private", "alice")
BOB = Namespace("private", "bob")
TEAM = Namespace("group", "team")
PUBLIC = Namespace("public", "system prompt")
SHAPE = ChunkShape(first_layer=2, layers=3, tokens=4, kv_heads=2, head_dim=8, dtype=torch.float32)


def some_kv(shape: ChunkShape, seed: int = 0) -> torch.Tensor:
    """A random chunk of that shape, normal."""
    return torch.randn(shape.size, generator=torch.Generator().manual_seed(seed)).to(shape.dtype)


def some_link(keyring: Keyring, namespace: Namespace = ALICE, seed: int = 0) -> Link:
    """The first link of a sequence of four tokens."""
    return Chain(keyring, MODEL, 4, Sharing(namespace)).links([seed, 1, 2, 3], 1)[0]
