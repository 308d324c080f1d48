"""compressed-tensors, as llm-compressor writes it: formats pack-quantized, int-quantized, float-quantized, naive.

`weight_packed` int32 [out, in * bits / 32] with `weight_shape` holds signed integers plus 2^(bits-1), packed along the
columns; or `weight` is int8 or float8_e4m3fn [out, in]. `weight_scale` and `weight_zero_point` are for all, for each
row, for each group of a row's inputs, or for each block. The zeros of packed weights are packed along the rows.
A weight is scale * (q - zero).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from engine.quantized.base import Shape, WeightFormat, spread, unpacked
from engine.quantized.integers import IntegerWeight, stored

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")
BITS = (2, 4, 8)


class CompressedTensors(WeightFormat):
    """Weights in any of the formats; which one each has shows in its stored tensors."""

    method = "compressed-tensors"
    main = ("weight_packed", "weight")
    parts = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    dropped = (".input_scale", ".input_zero_point", ".output_scale", ".k_scale", ".v_scale", ".q_scale")

    def check(self) -> None:
        """Refuse other formats, sparsity and transforms; note that activations are not quantized."""
        groups = self.settings.get("config_groups") or {}
        named = [self.settings.get("format"), *(group.get("format") for group in groups.values())]
        for kind in filter(None, named):
            if kind not in FORMATS:
                raise self.refusal(f"of format {kind!r} is not supported; supported: {', '.join(FORMATS)}")
        if (self.settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
            raise self.refusal("with sparsity_config is not supported; supported: dense weights")
        if (self.settings.get("transform_config") or {}).get("config_groups"):
            raise self.refusal("with transform_config is not supported; supported: weights without transforms")
        bits = {weights.get("num_bits", 8) for group in groups.values() if (weights := group.get("weights"))}
        if wrong := sorted(bits - {*BITS}):
            raise self.refusal(f"of num_bits {wrong[0]} is not supported; supported: {', '.join(map(str, BITS))}")
        self._bits = bits or {*BITS}
        self._blocks = [block for group in groups.values() if (block := _block(group.get("weights") or {}))]
        if any(group.get("input_activations") for group in groups.values()):
            self.notes.append("its activations are not quantized: they are computed in the model's dtype")
        if self.settings.get("kv_cache_scheme"):
            self.notes.append("its kv_cache_scheme is not applied: keys and values are kept in the model's dtype")

    def is_quantized(self, parts: Mapping[str, str]) -> bool:
        """Only a weight with scales is."""
        return "weight_scale" in parts

    def shape(self, shapes: Mapping[str, Shape], read: Callable[[str], torch.Tensor]) -> Shape:
        """As it is stored; a packed weight's is stored with it."""
        if "weight_packed" not in shapes:
            return shapes["weight"]
        rows, columns = read("weight_shape").tolist()
        return rows, columns

    def dense(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """scale * (q - zero)."""
        codes, zero, offset, _ = self._parts_of(tensors)
        dense, scale = codes.float().sub_(offset), tensors["weight_scale"].float()
        shape = tuple(dense.shape)
        group = self._order_of(tensors)
        if group is not None:
            scale = scale[:, group]
            zero = zero[:, group] if zero is not None else None
        if zero is not None:
            dense -= spread(zero.float() - offset, shape, self._blocks)
        return dense.mul_(spread(scale, shape, self._blocks))

    def integers(self, tensors: Mapping[str, torch.Tensor]) -> IntegerWeight | None:
        """With a scale for each row, or each group of a row's inputs."""
        codes, zero, offset, bits = self._parts_of(tensors)
        scale = tensors["weight_scale"]
        scale = scale.reshape(-1, 1) if scale.ndim == 1 else scale
        rows, columns = codes.shape
        fits = codes.dtype != torch.float8_e4m3fn and scale.ndim == 2 and scale.shape[0] == rows
        if not fits or columns % scale.shape[1]:
            return None
        if zero is None:
            zero = torch.full(scale.shape, float(offset))
        elif zero.numel() != scale.numel():
            return None
        index = self._order_of(tensors)
        return stored(codes, scale, zero.reshape(scale.shape).float(), bits, columns // scale.shape[1], index)

    def _parts_of(self, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None, int, int]:
        """Stored numbers [out, in], zeros, what was added to both, and bits."""
        zero = tensors.get("weight_zero_point")
        if "weight_packed" not in tensors:
            return tensors["weight"], zero, 0, 8
        rows, columns = tensors["weight_shape"].tolist()
        packed = tensors["weight_packed"]
        bits = next(each for each in sorted(self._bits) if -(-columns * each // 32) == packed.shape[1])
        offset = 1 << (bits - 1)
        if zero is not None:
            zero = unpacked(zero, bits, 0)[:rows] if zero.dtype == torch.int32 else zero.float() + offset
        return unpacked(packed, bits, 1)[:, :columns], zero, offset, bits

    @staticmethod
    def _order_of(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """The group of each input, where groups are not of inputs side by side."""
        group = tensors.get("weight_g_idx")
        ordered = group is not None and tensors["weight_scale"].ndim == 2 and int(group.min()) >= 0
        return group.long() if group is not None and ordered else None


def _block(weights: Mapping[str, Any]) -> list[int] | None:
    """Rows and columns that share a scale, where a part of a row does."""
    if weights.get("strategy") == "block":
        found = weights.get("block_structure")
        return [int(size) for size in found.split("x")] if isinstance(found, str) else found
    size = weights.get("group_size") or 0
    return [1, size] if size > 0 else None
