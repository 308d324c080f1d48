"""The Llama family on a CUDA device: lean layers, as CUDA graphs where a batch has few rows."""

from __future__ import annotations

import torch

from decoding.sketch import WHOLE, Depth
from engine.attention.layout import Layout
from engine.attention.step import AttentionStep
from engine.cuda.fused import run
from engine.cuda.graphs import Bucket, Graphs, Recorder
from engine.cuda.step import CudaStep, PagedStep
from engine.lean import LeanStack
from engine.stacks import ModelParts


class CudaStack(LeanStack):
    """See `engine.lean.LeanStack`.

    Args:
        parts: a model whose `kind` is in `engine.lean.LEAN`; taken over.
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
        depth: Depth = WHOLE,
        states: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """See `engine.stacks.LayerStack.hidden`; hidden states are valid until the next forward."""
        assert isinstance(step, CudaStep)
        # What a tap reads would not outlive the next replay.
        bucket = None if taps or depth != WHOLE else Bucket.of(layout)
        if bucket is None:
            return super().hidden(layout, step, taps, depth, states)
        return self._graphs.run(bucket, step, self._angles.table(int(layout.positions.max()))), {}

    def _forward(self, tokens: torch.Tensor, angles: torch.Tensor, step: PagedStep) -> torch.Tensor:
        """tokens [rows], angles [rows, 2, head_dim] -> [rows, hidden]."""
        return run(self._layers, self._parts.embed(tokens), angles, step)
