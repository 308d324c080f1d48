"""FP8 as DeepSeek, Qwen and Mistral ship it (`quant_method: fp8`).

`weight` float8_e4m3fn [out, in], and `weight_scale_inv` (some tools: `weight_scale`): a factor for all, for each row,
or for each block of `weight_block_size` (128 by 128), whose last ones may be cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from engine.quantized.base import Shape, WeightFormat, spread

SCALES = ("weight_scale_inv", "weight_scale")


class Fp8(WeightFormat):
    """Weights of 8-bit floating point with factors."""

    method = "fp8"
    main = ("weight",)
    parts = SCALES
    dropped = (".activation_scale", ".input_scale", ".k_scale", ".v_scale")

    def check(self) -> None:
        """Refuse other number formats; note that activations are not quantized."""
        kind = self.settings.get("fmt", "e4m3")
        if kind not in ("e4m3", "float8_e4m3fn"):
            raise self.refusal(f"of fmt {kind!r} is not supported; supported: e4m3")
        block = self.settings.get("weight_block_size")
        self._blocks = [block] if block else []
        if self.settings.get("activation_scheme"):
            self.notes.append("its activations are not quantized to fp8: they are computed in the model's dtype")

    def is_quantized(self, parts: Mapping[str, str]) -> bool:
        """Only a weight with factors is."""
        return bool(parts)

    def shape(self, shapes: Mapping[str, Shape], read: Callable[[str], torch.Tensor]) -> Shape:
        """As it is stored."""
        return shapes["weight"]

    def dense(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The weight times its factors."""
        dense = tensors["weight"].float()
        factors = next(tensors[name] for name in SCALES if name in tensors).float()
        return dense.mul_(spread(factors, tuple(dense.shape), self._blocks))
