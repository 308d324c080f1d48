"""GPTQ, as AutoGPTQ and GPTQModel write it (formats `gptq` and `gptq_v2`).

`qweight` int32 [in * bits / 32, out], packed along the rows; `qzeros` int32 [groups, out * bits / 32], packed along
the columns; `scales` [groups, out]; `g_idx` int32 [in], the group of each input. A weight is scale * (q - zero). The
older format stores zero - 1, which is undone on the whole word as GPTQModel does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from engine.quantized.base import Shape, WeightFormat, unpacked

BITS = (2, 4, 8)
FORMATS = ("gptq", "gptq_v2")


class Gptq(WeightFormat):
    """Weights in groups of inputs, in the order of their activations or not."""

    method = "gptq"
    main = ("qweight",)
    parts = ("qzeros", "scales", "g_idx")

    def check(self) -> None:
        """Refuse other packings, and bits that are not packed whole."""
        self._version = str(self.settings.get("checkpoint_format") or self.settings.get("format") or "gptq")
        if self._version not in FORMATS:
            raise self.refusal(f"of checkpoint_format {self._version!r} is not supported; supported: {FORMATS}")
        bits = self.settings.get("bits")
        if bits not in BITS:
            raise self.refusal(f"of bits {bits} is not supported; supported: {', '.join(map(str, BITS))}")

    def shape(self, shapes: Mapping[str, Shape], read: Callable[[str], torch.Tensor]) -> Shape:
        """[out, in]; the bits follow from the zeros, since single layers may have others."""
        rows, columns = shapes["qweight"]
        return columns, rows * 32 // self._bits(shapes)

    def dense(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """scale * (q - zero), by groups of inputs."""
        scales, zeros = tensors["scales"].float(), tensors["qzeros"]
        bits = self._bits({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        if self._version == "gptq":
            zeros = zeros + sum(1 << shift for shift in range(0, 32, bits))
        numbers = unpacked(tensors["qweight"], bits, 0)
        group = tensors.get("g_idx")
        if group is None:
            group = torch.arange(len(numbers)) // -(-len(numbers) // len(scales))
        group = group.long()
        offsets = unpacked(zeros, bits, 1).float()
        dense = numbers.float()
        dense -= offsets[group]
        dense *= scales[group]
        return dense.T

    def _bits(self, shapes: Mapping[str, Shape]) -> int:
        return 32 * shapes["qzeros"][1] // shapes["qweight"][1]
