"""AWQ, as AutoAWQ writes it for its `gemm` kernel.

`qweight` int32 [in, out / 8] and `qzeros` int32 [groups, out / 8], of 4 bits, eight columns in a word in the order
0, 2, 4, 6, 1, 3, 5, 7; `scales` [groups, out]. A weight is scale * (q - zero).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from engine.quantized.base import Shape, WeightFormat, unpacked
from engine.quantized.integers import IntegerWeight, stored

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Awq(WeightFormat):
    """Weights of 4 bits in groups of inputs, with zeros."""

    method = "awq"
    main = ("qweight",)
    parts = ("qzeros", "scales")

    def check(self) -> None:
        """Refuse other packings, other bits, and weights without zeros."""
        version = str(self.settings.get("version") or self.settings.get("format") or "gemm").lower()
        if version != "gemm":
            raise self.refusal(f"of version {version!r} is not supported; supported: gemm")
        bits = self.settings.get("bits", self.settings.get("w_bit", 4))
        if bits != 4:
            raise self.refusal(f"of bits {bits} is not supported; supported: 4")
        if not self.settings.get("zero_point", True):
            raise self.refusal("without zero_point is not supported; supported: zero_point true")

    def shape(self, shapes: Mapping[str, Shape], read: Callable[[str], torch.Tensor]) -> Shape:
        """[out, in]."""
        rows, columns = shapes["qweight"]
        return columns * 8, rows

    def dense(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """scale * (q - zero), by groups of inputs."""
        scales = tensors["scales"].float()
        dense = _columns(tensors["qweight"]).float()
        size = len(dense) // len(scales)
        groups = dense.view(len(scales), size, -1)
        groups -= _columns(tensors["qzeros"]).float()[:, None]
        groups *= scales[:, None]
        return dense.T

    def integers(self, tensors: Mapping[str, torch.Tensor]) -> IntegerWeight | None:
        """4 bits with zeros."""
        codes, zeros, scales = _columns(tensors["qweight"]), _columns(tensors["qzeros"]), tensors["scales"]
        return stored(codes.T, scales.T, zeros.T, 4, len(codes) // len(scales))


def _columns(words: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, columns * 8] of int32 [rows, columns], the columns in their order."""
    places = torch.tensor([ORDER.index(column) for column in range(len(ORDER))])
    return unpacked(words, 4, 1).view(len(words), -1, len(ORDER))[:, :, places].flatten(1)
