"""The KV tensors of one model, one per layer, addressed by slot."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.cache.kv_formats import KVDtype, dequantize, head_bytes, quantize, stored_dtype, stored_width


class PagedKV:
    """Keys and values side by side, [num_slots, 2, kv_heads, head_dim] per layer: one write and one gather serve both.

    `layers` hold them as they are kept (`engine.cache.kv_formats`), and so does what leaves and enters by blocks;
    `write`, `span` and `gather` take and give numbers of the model.

    Args:
        num_layers: decoder layers.
        num_slots: tokens it can hold (blocks x block size).
        kv_heads: key/value heads.
        head_dim: width of a head.
        dtype: of keys and values.
        device: where they live.
        kv_dtype: how they are kept.

    Attributes:
        kv_heads: heads of what `read_blocks` gives and `write_blocks` takes: all of them, where processes share them.
        head_dim: likewise, with a scale where there is one.
        dtype: likewise.
        kv_dtype: how they are kept.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: KVDtype = "auto",
    ) -> None:
        self.kv_heads, self.head_dim = kv_heads, stored_width(kv_dtype, head_dim)
        self.dtype, self.kv_dtype, self.device = stored_dtype(kv_dtype, dtype), kv_dtype, device
        shape = (num_slots, 2, kv_heads, self.head_dim)
        self.layers = [torch.zeros(shape, dtype=self.dtype, device=device) for _ in range(num_layers)]
        self._read_dtype = dtype

    @staticmethod
    def slot_bytes(
        num_layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, kv_dtype: KVDtype = "auto"
    ) -> int:
        """Memory one token takes, in bytes."""
        return 2 * num_layers * kv_heads * head_bytes(kv_dtype, head_dim, dtype.itemsize)

    def write(self, layer: int, slots: torch.Tensor, pairs: torch.Tensor) -> None:
        """Keep keys and values [T, 2, kv_heads, head_dim] of the model in slots, int64 [T]."""
        self.layers[layer].index_copy_(0, slots, pairs if self.kv_dtype == "auto" else quantize(pairs))

    def span(self, layer: int, first: int, count: int) -> torch.Tensor:
        """Numbers of the model in slots that follow each other, [count, 2, kv_heads, head_dim]; not to be written."""
        return self._read(self.layers[layer][first : first + count])

    def gather(self, layer: int, blocks: torch.Tensor, block_size: int) -> torch.Tensor:
        """Numbers of the model in blocks, int64 [n]: [n * block_size, 2, kv_heads, head_dim]."""
        cache = self.layers[layer]
        rows = cache.view(-1, block_size * cache[0].numel()).index_select(0, blocks)
        return self._read(rows.view(-1, *cache.shape[1:]))

    def _read(self, stored: torch.Tensor) -> torch.Tensor:
        return stored if self.kv_dtype == "auto" else dequantize(stored, self._read_dtype)

    @torch.inference_mode()
    def copy_block(self, source: int, target: int, block_size: int) -> None:
        """Copy one block's content onto another."""
        read = slice(source * block_size, (source + 1) * block_size)
        write = slice(target * block_size, (target + 1) * block_size)
        for layer in self.layers:
            layer[write] = layer[read]

    @torch.inference_mode()
    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy slots to slots; all sources are read before any target is written."""
        read = torch.tensor(sources, device=self.device)
        write = torch.tensor(targets, device=self.device)
        for layer in self.layers:
            layer.index_copy_(0, write, layer.index_select(0, read))

    @torch.inference_mode()
    def read_blocks(self, blocks: list[int], block_size: int) -> torch.Tensor:
        """A copy of what blocks hold: [layers, tokens, 2, kv_heads, head_dim] on the CPU, the blocks in their order."""
        return self.gather_blocks(blocks, block_size).to("cpu")

    @torch.inference_mode()
    def gather_blocks(self, blocks: list[int], block_size: int) -> torch.Tensor:
        """The same, where the cache is."""
        shape = (len(self.layers), len(blocks) * block_size, *self.layers[0].shape[1:])
        kv = torch.empty(shape, dtype=self.layers[0].dtype, device=self.device)
        for at, slots in _runs(blocks, block_size):
            for index, layer in enumerate(self.layers):
                kv[index, at : at + slots.stop - slots.start] = layer[slots]
        return kv

    @torch.inference_mode()
    def write_blocks(self, blocks: list[int], block_size: int, kv: torch.Tensor) -> None:
        """Fill blocks from [layers, tokens, 2, kv_heads, head_dim], on any device; the other way round."""
        kv = kv.to(self.device)
        for at, slots in _runs(blocks, block_size):
            for index, layer in enumerate(self.layers):
                layer[slots] = kv[index, at : at + slots.stop - slots.start]


def _runs(blocks: list[int], block_size: int) -> Iterator[tuple[int, slice]]:
    """Runs of neighbouring blocks: (their first token's place among all tokens, their slots)."""
    start = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or blocks[end] != blocks[end - 1] + 1:
            yield start * block_size, slice(blocks[start] * block_size, (blocks[end - 1] + 1) * block_size)
            start = end
