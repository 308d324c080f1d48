"""How a CUDA device computes; see `engine.backends.base.Backend`."""

from __future__ import annotations

import torch

from engine.architectures.base import ModelParts
from engine.attention.layout import Layout
from engine.attention.step import AttentionStep
from engine.backends.cuda.graphs import CudaRecorder
from engine.backends.cuda.stack import CudaStack
from engine.backends.cuda.step import CudaStep
from engine.backends.stacks import LayerStack, ModuleStack
from engine.cache.kv_formats import KVDtype
from engine.cache.paged_kv import PagedKV


class CudaBackend:
    """Paged attention in Triton; the Llama family's layers as CUDA graphs, other architectures' modules as they are.

    Args:
        device: a CUDA device.
    """

    name = "cuda"
    keeps_trees = False
    kv_dtypes: tuple[KVDtype, ...] = ("auto",)

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._processors: int = torch.cuda.get_device_properties(device).multi_processor_count

    def stack(self, parts: ModelParts, dtype: torch.dtype) -> LayerStack:
        """See `engine.backends.base.Backend.stack`."""
        if parts.fused:
            return CudaStack(parts, dtype, CudaRecorder(self._device))
        return ModuleStack(parts)

    def step(self, layout: Layout, store: PagedKV) -> AttentionStep:
        """See `engine.backends.base.Backend.step`."""
        return CudaStep(layout, store, self._processors)
