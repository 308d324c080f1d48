"""Ragged batches over a block pool for tests of attention: random caches, trees, and layouts drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st

from decoding.tree import DraftTree
from engine.attention.layout import Layout, lay_out
from engine.cache.paged_kv import PagedKV

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Batch:
    """A ragged batch and the heads that attend over it.

    Attributes:
        counts: tokens each sequence feeds.
        cached: tokens each has in the cache.
        trees: sequence -> parents of its tree's nodes, its last fed tokens.
        offsets: of each sequence; none: all 0.
    """

    counts: tuple[int, ...]
    cached: tuple[int, ...]
    trees: dict[int, tuple[int, ...]] = field(default_factory=dict)
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    block_size: int = 4
    seed: int = 0
    offsets: tuple[int, ...] | None = None

    @property
    def num_blocks(self) -> int:
        """Of the pool; a few of them are nobody's."""
        return sum(self._needs) + 3

    @property
    def _needs(self) -> list[int]:
        pairs = zip(self.counts, self.cached, strict=True)
        return [-(-(count + cached) // self.block_size) for count, cached in pairs]

    def layout(self) -> Layout:
        """Laid out over blocks in random order."""
        rng = np.random.default_rng(self.seed)
        ends = np.cumsum(self._needs)
        order = rng.permutation(self.num_blocks).astype(np.int32)
        tables = [order[end - need : end] for end, need in zip(ends, self._needs, strict=True)]
        trees = {}
        for sequence, parents in self.trees.items():
            tree = DraftTree((0,) * len(parents), parents, "draft")
            trees[sequence] = (tree.ancestor_mask(), tree.depths())
        tokens = rng.integers(0, 50, sum(self.counts)).tolist()
        return lay_out(tokens, list(self.counts), list(self.cached), tables, self.block_size, trees, self.offsets)

    def store(self, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> PagedKV:
        """One layer of random keys and values."""
        store = PagedKV(1, self.num_blocks * self.block_size, self.kv_heads, self.dim, dtype, device)
        generator = torch.Generator().manual_seed(self.seed)
        store.layers[0].copy_(torch.randn(store.layers[0].shape, generator=generator))
        return store

    def inputs(
        self, dtype: torch.dtype = torch.float32, device: torch.device = CPU
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [rows, heads, dim]; new keys and values [rows, 2, kv_heads, dim]."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        rows = sum(self.counts)
        query = torch.randn(rows, self.heads, self.dim, generator=generator)
        pairs = torch.randn(rows, 2, self.kv_heads, self.dim, generator=generator)
        return query.to(device, dtype), pairs.to(device, dtype)


def random_tree(size: int, seed: int) -> tuple[int, ...]:
    """Parents of a random tree."""
    rng = np.random.default_rng(seed)
    return tuple(int(rng.integers(-1, node)) if node else -1 for node in range(size))


@st.composite
def batches(draw: st.DrawFn, most_fed: int = 9, dims: Sequence[int] = (16,)) -> Batch:
    """Small ragged batches with and without trees."""
    counts = tuple(draw(st.lists(st.integers(1, most_fed), min_size=1, max_size=4)))
    cached = tuple(draw(st.lists(st.integers(0, 70), min_size=len(counts), max_size=len(counts))))
    seed = draw(st.integers(0, 1000))
    trees = {}
    for sequence, count in enumerate(counts):
        nodes = draw(st.integers(0, count))
        if nodes:
            trees[sequence] = random_tree(nodes, seed + sequence)
    kv_heads = draw(st.sampled_from((1, 2)))
    return Batch(
        counts,
        cached,
        trees,
        heads=kv_heads * draw(st.sampled_from((1, 3, 4))),
        kv_heads=kv_heads,
        dim=draw(st.sampled_from(tuple(dims))),
        block_size=draw(st.sampled_from((1, 3, 16))),
        seed=seed,
    )
