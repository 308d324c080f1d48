"""The KV tensors of one model, one per layer, addressed by slot."""

from __future__ import annotations

import torch


class KVStore:
    """Keys and values side by side, [num_slots, 2, kv_heads, head_dim] per layer: one write and one gather serve both.

    Args:
        num_layers: decoder layers.
        num_slots: tokens it can hold (blocks x block size).
        kv_heads: key/value heads.
        head_dim: width of a head.
        dtype: of keys and values.
        device: where they live.
    """

    def __init__(
        self, num_layers: int, num_slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (num_slots, 2, kv_heads, head_dim)
        self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.device = device

    @staticmethod
    def slot_bytes(num_layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Memory one token takes, in bytes."""
        return 2 * num_layers * kv_heads * head_dim * dtype.itemsize

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
