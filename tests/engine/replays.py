"""The check that layers replayed from a graph compute what the same layers do when launched one by one."""

from __future__ import annotations

import torch

from decoding.partial_forward import LayerSelection
from decoding.read_spec import FEED_FORWARD
from engine.backends.cuda.graphs import OFTEN, Part
from engine.backends.cuda.stack import CudaStack
from engine.backends.cuda.step import CudaStep
from engine.backends.llama_fused import FusedLlamaStack
from engine.cache.paged_kv import PagedKV
from engine.loaded_model import LoadedModel
from tests.engine.layouts import Batch, random_tree

BLOCK_SIZE = 4
# Several batches in each bucket, so that all but the first are replays over what another batch left. The first two
# are of one bucket, and the two after them.
SHAPES: list[tuple[tuple[int, ...], dict[int, tuple[int, ...]]]] = [
    ((1, 1, 1), {}),
    ((1, 1, 1, 1), {}),
    ((5, 2), {1: (-1, -1)}),
    ((1, 6), {1: random_tree(5, 3)}),
    ((1,), {}),
    ((1, 1, 1), {}),
    ((3, 3), {}),
]


# Parts of a model of four layers: tapped, without some sub-layers, only the first, the others, and in groups.
PARTS = (
    Part(taps=frozenset({0, 2, 4, FEED_FORWARD})),
    Part(LayerSelection(skipped=frozenset({2, 5, 7})), frozenset({2})),
    Part(LayerSelection(last=2)),
    Part(LayerSelection(first=2), frozenset({2, 3})),
    Part(LayerSelection(groups=((1, 3),)), frozenset({3})),
)
# A single layer, which is never recorded.
LITTLE = Part(LayerSelection(first=1, last=2), frozenset({2}))


@torch.inference_mode()
def assert_replays_equal_launches(plan: LoadedModel, device: torch.device, tolerance: float = 1e-5) -> None:
    """Run parts over batches of many shapes through graphs and without; what comes out and the caches must agree."""
    assert isinstance(plan.stack, CudaStack)
    assert plan.num_layers == 4
    replayed, launched = (
        PagedKV(plan.num_layers, 4096, plan.kv_heads, plan.head_dim, torch.float32, device) for _ in range(2)
    )
    generator = torch.Generator().manual_seed(0)
    for mine, theirs in zip(replayed.layers, launched.layers, strict=True):
        theirs.copy_(torch.randn(mine.shape, generator=generator))
        mine.copy_(theirs)
    runs = [(shape, Part()) for shape in SHAPES]
    # Two batches of one bucket, of single tokens or with trees, are launched until the part is recorded; the last run
    # is a replay of the other one's recording.
    parts = enumerate((*PARTS, LITTLE))
    runs += [(SHAPES[2 * (place % 2) + run % 2], part) for place, part in parts for run in range(OFTEN + 1)]
    for seed, ((counts, trees), part) in enumerate(runs):
        cached = tuple((7 * seed + 11 * place) % 30 for place in range(len(counts)))
        layout = Batch(counts, cached, trees, block_size=BLOCK_SIZE, seed=seed).layout()
        states = None
        if part.depth.first:
            states = torch.randn(layout.num_tokens, plan.width, generator=generator).to(device)
        asked = part.taps, part.depth, states
        got, taps = plan.stack.hidden(layout, CudaStep(layout, replayed, 8), *asked)
        expected, tapped = FusedLlamaStack.hidden(plan.stack, layout, CudaStep(layout, launched, 8), *asked)
        torch.testing.assert_close((got, taps), (expected, tapped), atol=tolerance, rtol=tolerance)
        for mine, theirs in zip(replayed.layers, launched.layers, strict=True):
            torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)
    assert {part for _, part in plan.stack._graphs._parts} == set(PARTS)
