"""Attention of one forward on a CUDA device: Triton for rows of decoding and drafts, torch for prompt chunks."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from engine.attention.layout import Layout, select
from engine.attention.sdpa import SdpaStep
from engine.attention.step import AttentionStep, Scores
from engine.backends.cuda.buckets import Bucket
from engine.backends.cuda.metadata import MAX_TREE, Extent, Metadata
from engine.backends.cuda.paged_attention import Reach, attend, tile, write
from engine.cache.paged_kv import PagedKV

# Sequences that feed more tokens than this are prompt chunks: bound by arithmetic, and better off with gathered keys.
MAX_FED = MAX_TREE
# Rows of wider heads, such as latents, do not fit into a program's registers: torch attends to those.
MAX_HEAD_DIM = 256


class PagedStep:
    """Attention of sequences that feed at most `MAX_FED` tokens each, over metadata on the device.

    Args:
        metadata: the batch; may be overwritten by another batch within the same reach between two forwards.
        store: the cache.
        block_size: tokens of a block.
        reach: bounds of what the batch may be.
        processors: multiprocessors of the device.
    """

    def __init__(self, metadata: Metadata, store: PagedKV, block_size: int, reach: Reach, processors: int) -> None:
        self.metadata = metadata
        self.store = store
        self._block_size = block_size
        self.reach = reach
        self._processors = processors

    @classmethod
    def of(cls, layout: Layout, store: PagedKV, processors: int, bucket: Bucket | None = None) -> PagedStep:
        """For one batch, cut as its bucket is where it has one; its metadata is copied to the device."""
        metadata = Metadata.empty(Extent.of(layout), store.device)
        metadata.load(layout)
        if bucket is not None:
            reach = bucket.reach(layout.block_size)
        else:
            reach = Reach(layout.num_tokens, layout.num_sequences, int(layout.counts.max()), int(layout.lengths.max()))
        return cls(metadata, store, layout.block_size, reach, processors)

    def attend(self, layer: int, query: torch.Tensor, pairs: torch.Tensor, scores: Scores) -> torch.Tensor:
        """See `engine.attention.step.AttentionStep.attend`."""
        # Triton launches on the current device, which need not be the model's; the CPU's number, -1, changes nothing.
        with torch.cuda.device(query.get_device()):
            write(self.store.layers[layer], self.metadata.slots, pairs)
            return self.attend_written(layer, query, scores)

    def attend_written(self, layer: int, query: torch.Tensor, scores: Scores) -> torch.Tensor:
        """The same for rows whose keys and values stand in their slots, on the current device."""
        cache = self.store.layers[layer]
        tiling = tile(self.reach, cache, query.shape[1] // cache.shape[2], self._processors, scores.window)
        return attend(query, cache, self.metadata, scores, tiling, self._block_size)


class MixedStep:
    """A batch with prompt chunks in it: its parts attend one after the other.

    Args:
        layout: the batch.
        store: the cache.
        processors: multiprocessors of the device.
    """

    def __init__(self, layout: Layout, store: PagedKV, processors: int) -> None:
        is_chunk = layout.counts > MAX_FED
        self._parts: list[tuple[AttentionStep, torch.Tensor]] = []
        chunks, rows = select(layout, np.flatnonzero(is_chunk))
        self._parts.append((SdpaStep(chunks, store), torch.from_numpy(rows).to(store.device)))
        if not is_chunk.all():
            short, rows = select(layout, np.flatnonzero(~is_chunk))
            self._parts.append((PagedStep.of(short, store, processors), torch.from_numpy(rows).to(store.device)))

    def attend(self, layer: int, query: torch.Tensor, pairs: torch.Tensor, scores: Scores) -> torch.Tensor:
        """See `engine.attention.step.AttentionStep.attend`."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for step, rows in self._parts:
            mine = step.attend(layer, query.index_select(0, rows), pairs.index_select(0, rows), scores)
            out.index_copy_(0, rows, mine)
        return out


class CudaStep:
    """One forward's attention. Nothing is copied to the device before it is needed.

    Args:
        layout: the batch.
        store: the cache.
        processors: multiprocessors of the device.

    Attributes:
        bucket: of the batch, to cut it as its graph is, so that only those kernels are compiled; None: as is best.
    """

    def __init__(self, layout: Layout, store: PagedKV, processors: int) -> None:
        self.layout = layout
        self.store = store
        self.processors = processors
        self.bucket: Bucket | None = None

    @property
    def is_short(self) -> bool:
        """Whether no sequence feeds more than `MAX_FED` tokens."""
        return bool((self.layout.counts <= MAX_FED).all())

    @cached_property
    def _plain(self) -> SdpaStep:
        return SdpaStep(self.layout, self.store)

    @cached_property
    def parts(self) -> PagedStep | MixedStep:
        """What computes it."""
        if self.is_short:
            return PagedStep.of(self.layout, self.store, self.processors, self.bucket)
        return MixedStep(self.layout, self.store, self.processors)

    def attend(self, layer: int, query: torch.Tensor, pairs: torch.Tensor, scores: Scores) -> torch.Tensor:
        """See `engine.attention.step.AttentionStep.attend`."""
        cut = scores.chunk is not None and scores.cut(int(self.layout.positions.max()) + 1)
        if cut or scores.sinks is not None or query.shape[-1] > MAX_HEAD_DIM:
            return self._plain.attend(layer, query, pairs, scores)
        return self.parts.attend(layer, query, pairs, scores)
