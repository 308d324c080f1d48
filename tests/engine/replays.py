"""The check that layers replayed from a graph compute what the same layers do when launched one by one."""

from __future__ import annotations

import torch

from engine.cache.store import KVStore
from engine.cuda.step import CudaStep
from engine.plan import LayerPlan
from tests.engine.layouts import Batch, random_tree

BLOCK_SIZE = 4
# Several batches in each bucket, so that all but the first are replays over what another batch left.
SHAPES: list[tuple[tuple[int, ...], dict[int, tuple[int, ...]]]] = [
    ((1, 1, 1), {}),
    ((1, 1, 1, 1), {}),
    ((5, 2), {1: (-1, -1)}),
    ((1, 6), {1: random_tree(5, 3)}),
    ((1,), {}),
    ((1, 1, 1), {}),
    ((3, 3), {}),
]


@torch.inference_mode()
def assert_replays_equal_launches(plan: LayerPlan, device: torch.device, tolerance: float = 1e-5) -> None:
    """Run batches of many shapes through graphs and without; hidden states and caches must agree."""
    replayed, launched = (
        KVStore(plan.num_layers, 4096, plan.kv_heads, plan.head_dim, torch.float32, device) for _ in range(2)
    )
    generator = torch.Generator().manual_seed(0)
    for mine, theirs in zip(replayed.layers, launched.layers, strict=True):
        theirs.copy_(torch.randn(mine.shape, generator=generator))
        mine.copy_(theirs)
    for seed, (counts, trees) in enumerate(SHAPES):
        cached = tuple((7 * seed + 11 * place) % 30 for place in range(len(counts)))
        layout = Batch(counts, cached, trees, block_size=BLOCK_SIZE, seed=seed).layout()
        got, _ = plan.stack.hidden(layout, CudaStep(layout, replayed, 8), frozenset())
        expected, taps = plan.stack.hidden(layout, CudaStep(layout, launched, 8), frozenset({1}))
        assert taps[1].shape == expected.shape
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=0)
        for mine, theirs in zip(replayed.layers, launched.layers, strict=True):
            torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=0)
