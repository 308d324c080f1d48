"""The Llama family on a CUDA device: lean layers, as CUDA graphs where a batch has few rows."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from decoding.partial_forward import WHOLE, LayerSelection
from engine.architectures.base import ModelParts
from engine.attention.layout import Layout
from engine.attention.step import AttentionStep
from engine.backends.cuda.buckets import Bucket, buckets
from engine.backends.cuda.fused import run
from engine.backends.cuda.graphs import Graphs, Output, Part, Recorder
from engine.backends.cuda.step import CudaStep, PagedStep
from engine.backends.llama_fused import FusedLlamaStack, LeanHalves
from engine.backends.parallel_attention import run_groups


class CudaStack(FusedLlamaStack):
    """See `engine.backends.llama_fused.FusedLlamaStack`.

    Args:
        parts: a model whose architecture is `fused`; taken over.
        dtype: of its weights.
        recorder: records the layers.
    """

    def __init__(self, parts: ModelParts, dtype: torch.dtype, recorder: Recorder) -> None:
        super().__init__(parts, dtype)
        self._graphs = Graphs(self._forward, recorder)

    def hidden(
        self,
        layout: Layout,
        step: AttentionStep,
        taps: frozenset[int],
        depth: LayerSelection = WHOLE,
        states: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """See `engine.backends.stacks.LayerStack.hidden`; what it returns is valid until the next forward."""
        assert isinstance(step, CudaStep)
        part, bucket = Part(depth, taps), Bucket.of(layout)
        if bucket is None or self._is_little(depth) or not self._graphs.wants(bucket, part):
            step.bucket = bucket
            return super().hidden(layout, step, taps, depth, states)
        return self._graphs.run(bucket, part, step, self._angles.table(int(layout.positions.max())), states)

    def setups(self, most_blocks: int) -> Iterable[tuple[int, int, int]]:
        """See `engine.backends.stacks.LayerStack.setups`; one for each graph of all layers."""
        return (bucket.smallest for bucket in buckets(most_blocks))

    def _is_little(self, depth: LayerSelection) -> bool:
        """Whether that is less than two layers: CLaSp runs each by itself, and would have all graphs for its own."""
        return depth != WHOLE and depth.runs(len(self._layers)) < 2

    def _forward(
        self, part: Part, tokens: torch.Tensor, states: torch.Tensor | None, angles: torch.Tensor, step: PagedStep
    ) -> Output:
        """See `engine.backends.cuda.graphs.Layers`."""
        hidden = self._parts.embed(tokens) if states is None else states
        if part.depth.groups:
            cos, sin = angles.unbind(1)
            halves = LeanHalves(self._layers, cos[:, None], sin[:, None], step)
            return run_groups(halves, hidden, part.depth, len(self._layers), part.taps)
        return run(self._layers, hidden, angles, step, part.depth, part.taps)
