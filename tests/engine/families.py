"""Ragged batches whose sequences share leading blocks, for tests of attention that reads those once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from decoding.tree import DraftTree
from engine.attention.layout import Layout, lay_out
from engine.cache.paged_kv import PagedKV
from tests.engine.layouts import CPU, random_tree


@dataclass(frozen=True)
class Member:
    """A sequence below a shared run of blocks.

    Attributes:
        run: index of the run; -1: it shares nothing.
        cached: tokens it has in the cache beyond the run's path.
        fed: tokens it feeds.
        nodes: of its draft tree, the last of them fed now.
        cached_nodes: of the tree, fed earlier; they count as cached.
    """

    run: int
    cached: int = 0
    fed: int = 1
    nodes: int = 0
    cached_nodes: int = 0


@dataclass(frozen=True)
class Family:
    """Sequences over a forest of shared runs of blocks.

    Attributes:
        runs: (parent or -1, blocks) of each run, parents first.
        members: the sequences.
    """

    runs: tuple[tuple[int, int], ...]
    members: tuple[Member, ...]
    block_size: int = 4
    seed: int = 0

    def depth(self, run: int) -> int:
        """Blocks on the path to the end of a run."""
        return 0 if run < 0 else self.runs[run][1] + self.depth(self.runs[run][0])

    @property
    def num_blocks(self) -> int:
        """Of the pool."""
        own = sum(-(-(m.cached + m.cached_nodes + m.fed) // self.block_size) for m in self.members)
        return sum(blocks for _, blocks in self.runs) + own + 2

    @property
    def num_rows(self) -> int:
        """Fed tokens."""
        return sum(m.fed for m in self.members)

    def layout(self) -> Layout:
        """Laid out over blocks in random order."""
        rng = np.random.default_rng(self.seed)
        free = rng.permutation(self.num_blocks).astype(np.int32).tolist()
        paths: list[list[int]] = []
        for parent, blocks in self.runs:
            paths.append((paths[parent] if parent >= 0 else []) + [free.pop() for _ in range(blocks)])
        tables, cached, trees = [], [], {}
        for index, member in enumerate(self.members):
            path = paths[member.run] if member.run >= 0 else []
            own = member.cached + member.cached_nodes
            fresh = [free.pop() for _ in range(-(-(own + member.fed) // self.block_size))]
            tables.append(np.array(path + fresh, dtype=np.int32))
            cached.append(len(path) * self.block_size + own)
            if member.nodes:
                tree = DraftTree((0,) * member.nodes, random_tree(member.nodes, self.seed + index), "draft")
                trees[index] = (tree.ancestor_mask()[member.cached_nodes :], tree.depths()[member.cached_nodes :])
        fed = [m.fed for m in self.members]
        return lay_out([0] * sum(fed), fed, cached, tables, self.block_size, trees)


@st.composite
def families(draw: st.DrawFn, keeps_trees: bool = True) -> Family:
    """Small forests with members of every kind; `keeps_trees`: of some, nodes were fed in an earlier forward."""
    num_runs = draw(st.integers(1, 4))
    runs = [(draw(st.integers(-1, index - 1)), draw(st.integers(1, 12))) for index in range(num_runs)]
    members = []
    for _ in range(draw(st.integers(2, 6))):
        run, cached, fed = draw(st.integers(-1, len(runs) - 1)), draw(st.integers(0, 30)), draw(st.integers(1, 9))
        held = draw(st.integers(0, 3)) if keeps_trees else 0
        nodes = fed if held else draw(st.integers(0, fed))  # nodes fed earlier are the keys before those fed now
        members.append(Member(run, cached, fed, nodes + held, held))
    size = draw(st.sampled_from((1, 4, 16)))
    return Family(tuple(runs), tuple(members), size, draw(st.integers(0, 1000)))


def inputs(family: Family, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Queries, new keys and values, and what the cache holds."""
    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(family.seed)
    sizes = (
        (family.num_rows, heads, dim),
        (family.num_rows, 2, kv_heads, dim),
        (family.num_blocks * family.block_size, 2, kv_heads, dim),
    )
    return tuple(torch.randn(size, generator=generator).to(dtype) for size in sizes)


def sinks_of(heads: int) -> torch.Tensor:
    """Sinks of which some take nearly nothing and some nearly everything."""
    return torch.linspace(-3.0, 9.0, heads)


def store_of(cache: torch.Tensor) -> PagedKV:
    """One layer with this content."""
    store = PagedKV(1, cache.shape[0], cache.shape[2], cache.shape[3], cache.dtype, CPU)
    store.layers[0].copy_(cache)
    return store
