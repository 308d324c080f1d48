"""GPTQ, as AutoGPTQ and GPTQModel write it (formats `gptq` and `gptq_v2`).

`qweight` int32 [in * bits / 32, out], packed along the rows; `qzeros` int32 [groups, out * bits / 32], packed along
the columns; `scales` [groups, out]; `g_idx` int32 [in], the group of each input. A weight is scale * (q - zero). The
older format stores zero - 1, which is undone on the whole word as GPTQModel does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from engine.quantized.base import Shape, WeightFormat, unpacked
from engine.quantized.integers import IntegerWeight, stored

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
            supported = ", ".join(FORMATS)
            raise self.refusal(f"of checkpoint_format {self._version!r} is not supported; supported: {supported}")
        bits = self.settings.get("bits")
        if bits not in BITS:
            raise self.refusal(f"of bits {bits} is not supported; supported: {', '.join(map(str, BITS))}")
        self._bits = int(bits)

    def shape(self, shapes: Mapping[str, Shape], read: Callable[[str], torch.Tensor]) -> Shape:
        """[out, in]; without `g_idx`, as many inputs as the words hold."""
        rows, columns = shapes["qweight"]
        return columns, shapes["g_idx"][0] if "g_idx" in shapes else rows * 32 // self._bits_of(shapes)

    def dense(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """scale * (q - zero), by groups of inputs."""
        codes, zeros, group, _ = self._parts_of(tensors)
        dense = codes.float()
        dense -= zeros[:, : dense.shape[1]].float()[group]
        dense *= tensors["scales"].float()[group]
        return dense.T

    def integers(self, tensors: Mapping[str, torch.Tensor]) -> IntegerWeight | None:
        """In the order of the groups, where inputs of one are not neighbours; None where groups have unlike sizes."""
        codes, zeros, group, bits = self._parts_of(tensors)
        scales, size = tensors["scales"], int((group == 0).sum())
        return stored(codes.T, scales.T, zeros[:, : codes.shape[1]].T, bits, size, group)

    def _parts_of(self, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """Integers [in, out], zeros [groups, out or more], the group of each input, and bits."""
        scales, zeros = tensors["scales"], tensors["qzeros"]
        bits = self._bits_of({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        if self._version == "gptq":
            zeros = zeros + sum(1 << shift for shift in range(0, 32, bits))
        codes = unpacked(tensors["qweight"], bits, 0)
        group = tensors.get("g_idx")
        if group is None:
            size = self.settings.get("group_size") or len(codes)
            if -(-len(codes) // size) != len(scales):  # a layer of its own
                size = -(-len(codes) // len(scales))
            group = torch.arange(len(codes)) // size
        return codes[: len(group)], unpacked(zeros, bits, 1), group.long(), bits

    def _bits_of(self, shapes: Mapping[str, Shape]) -> int:
        """Of one layer: single ones may have others than the rest, which shows in the words that hold the zeros.

        Raises:
            TurnoutError: INVALID_ARGUMENT: they are packed in a way that is not supported.
        """
        words, columns = shapes["qzeros"][1], shapes["qweight"][1]
        for bits in (self._bits, *BITS):
            if -(-columns * bits // 32) == words:
                return bits
        raise self.refusal(f"with {words} words for {columns} zeros is not supported; supported bits: 2, 4, 8")
