"""Attention over the block pool by the compiled kernels."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from engine.attention.layout import Layout
from engine.attention.prefixes import Prefixes
from engine.attention.step import Scores
from engine.backends.native import library as native
from engine.cache.paged_kv import PagedKV


class NativeStep:
    """One forward's attention.

    Args:
        layout: the batch; kept, because the kernels read its arrays.
        store: the cache, on the CPU.
        prefixes: what sequences of the batch have in common, to be read once for all of them; None: nothing.
    """

    def __init__(self, layout: Layout, store: PagedKV, prefixes: Prefixes | None = None) -> None:
        self._layout = layout
        self.store = store
        tree_sizes = np.zeros(layout.num_sequences, dtype=np.int32)
        for sequence, mask in layout.trees.items():
            tree_sizes[sequence] = mask.shape[1]
        masks = _tree_masks(layout, int(tree_sizes.max(initial=0)))
        self._read = np.zeros(1, dtype=np.int64)
        self._kept = (tree_sizes, masks, prefixes)
        self.batch = native.Batch(
            layout.num_tokens,
            layout.num_sequences,
            layout.blocks.shape[1],
            layout.block_size,
            masks.shape[1],
            layout.positions.ctypes.data,
            layout.slots.ctypes.data,
            layout.starts.ctypes.data,
            layout.lengths.ctypes.data,
            layout.blocks.ctypes.data,
            tree_sizes.ctypes.data,
            masks.ctypes.data,
            self._read.ctypes.data,
        )
        if prefixes is not None:
            self._share(prefixes)

    def _share(self, prefixes: Prefixes) -> None:
        batch = self.batch
        batch.nodes, batch.partial_rows = len(prefixes.nodes), prefixes.partial_rows
        batch.positions_end = int(self._layout.positions.max()) + 1
        batch.prefixes, batch.prefix_rows = prefixes.nodes.ctypes.data, prefixes.rows.ctypes.data
        batch.leaves, batch.places = prefixes.leaves.ctypes.data, prefixes.places.ctypes.data

    @property
    def keys_read(self) -> int:
        """Keys read so far with their values, one of each KV head and layer counted as one."""
        return int(self._read[0])

    def attend(self, layer: int, query: torch.Tensor, pairs: torch.Tensor, scores: Scores) -> torch.Tensor:
        """See `engine.attention.step.AttentionStep.attend`."""
        store = self.store
        store.write(layer, torch.from_numpy(self._layout.slots), pairs)
        query = query.contiguous()
        out = torch.empty_like(query)
        sinks = None if scores.sinks is None else scores.sinks.detach().float().contiguous()
        native.library().turnout_attention(
            query.dtype == torch.bfloat16,
            store.kv_dtype == "int8",
            ctypes.byref(self.batch),
            store.layers[layer].data_ptr(),
            pairs.shape[2],
            pairs.shape[3],
            query.shape[1],
            ctypes.byref(scores_struct(scores, sinks)),
            query.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


def scores_struct(scores: Scores, sinks: torch.Tensor | None = None) -> native.Scores:
    """The same for the kernels, where 0 stands for absent.

    Args:
        scores: how products become weights.
        sinks: its sinks, contiguous and in float32; kept by the caller while the kernels run.
    """
    address = None if sinks is None else sinks.data_ptr()
    return native.Scores(scores.scaling, scores.softcap or 0.0, scores.window or 0, scores.chunk or 0, address)


def _tree_masks(layout: Layout, largest: int) -> np.ndarray:
    """uint64 [T, words]: bit i of a node's row says that it sees node i; other rows stay empty."""
    words = max(-(-largest // 64), 1)
    if not layout.trees:
        return np.zeros((1, words), dtype=np.uint64)
    bits = np.zeros((layout.num_tokens, words * 64), dtype=np.uint8)
    for sequence, mask in layout.trees.items():
        end = layout.starts[sequence + 1]
        bits[end - mask.shape[0] : end, : mask.shape[1]] = mask.numpy()
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint64)
