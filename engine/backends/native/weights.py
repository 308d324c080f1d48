"""Weights packed into panels, and a linear layer over them."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from functools import reduce
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from engine.backends.native.library import Matrix, library, panel_columns
from engine.quantized.integers import IntegerWeight

STEPS = {4: 32, 5: 32, 6: 16, 8: 32}  # by the bits of an integer: how many are multiplied at once
LARGEST_GROUP = 128
Join = Callable[[list[torch.Tensor]], torch.Tensor]


class Product:
    """A linear layer over a packed weight, or over several.

    Args:
        dtype: of activations.
        columns: output features.
        width: input features.
    """

    struct: Matrix

    def __init__(self, dtype: torch.dtype, columns: int, width: int) -> None:
        self.dtype, self.columns, self.width = dtype, columns, width

    def __call__(self, rows: torch.Tensor, wide: bool = False) -> torch.Tensor:
        """[R, width] -> [R, columns], in the activations' dtype or, `wide`, in float32."""
        out = torch.empty(rows.shape[0], self.columns, dtype=torch.float32 if wide else self.dtype)
        library().turnout_linear(
            self.dtype == torch.bfloat16,
            ctypes.byref(self.struct),
            rows.data_ptr(),
            rows.shape[0],
            rows.stride(0),
            out.data_ptr(),
            wide,
            torch.get_num_threads(),
        )
        return out


class Packed(Product, ABC):
    """A linear layer's weight [columns, width] in panels of `panel_columns()` columns.

    Args:
        dtype: of activations.
        columns: output features.
        width: input features.
        bias: [columns].
    """

    def __init__(self, dtype: torch.dtype, columns: int, width: int, bias: torch.Tensor | None) -> None:
        super().__init__(dtype, columns, width)
        self._bias = None if bias is None else bias.detach().float().contiguous()

    @abstractmethod
    def part(self, columns: torch.Tensor) -> Packed:
        """Some columns (int64 [k]), packed anew."""

    def _bias_of(self, columns: torch.Tensor) -> torch.Tensor | None:
        return None if self._bias is None else self._bias[columns]

    def _bias_address(self) -> int | None:
        return None if self._bias is None else self._bias.data_ptr()


class Products(Product):
    """Several weights over the same input, whose columns follow each other.

    Args:
        parts: of one width and type of activations.
    """

    def __init__(self, parts: Sequence[Packed]) -> None:
        super().__init__(parts[0].dtype, sum(part.columns for part in parts), parts[0].width)
        self._parts = parts  # their memory is pointed to
        for part, after in pairwise(parts):
            part.struct.next = ctypes.addressof(after.struct)
        self.struct = parts[0].struct


class PackedMatrix(Packed):
    """A weight of numbers in the layout of `matrix.h`.

    Args:
        weight: [columns, width], bfloat16 or float32.
        bias: [columns].
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        columns, width = weight.shape
        super().__init__(weight.dtype, columns, width, bias)
        per_unit, panel = 4 // weight.element_size(), panel_columns()
        padded = F.pad(weight.detach(), (0, -self.width % per_unit, 0, -self.columns % panel))
        units = padded.shape[1] // per_unit
        panels = padded.view(-1, panel, units, per_unit).transpose(1, 2)
        self._panels = panels.contiguous()
        self.struct = Matrix(self._panels.data_ptr(), self._bias_address(), units, self.columns)

    def part(self, columns: torch.Tensor) -> PackedMatrix:
        """See `Packed.part`."""
        panel = self._panels.shape[2]
        weight = self._panels[columns // panel, :, columns % panel].reshape(len(columns), -1)[:, : self.width]
        return PackedMatrix(weight, self._bias_of(columns))


class IntegerMatrix(Packed):
    """A weight of integers in the layout of `integers.h`.

    Activations are rounded to 8 bits, each row by itself, with a scale for every group of its inputs.

    Args:
        weight: that the kernels `keeps`.
        bias: [columns].
        dtype: of activations, bfloat16 or float32.
    """

    def __init__(self, weight: IntegerWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        columns, width = weight.codes.shape
        super().__init__(dtype, columns, width, bias)
        self._order = None if weight.order is None else weight.order.contiguous()
        offset = 1 if weight.zeros is not None else 2 if weight.minimums is not None else 0
        self._kind = (weight.bits, width, weight.group, offset, weight.blocked)
        offsets = weight.zeros if weight.minimums is None else weight.minimums
        factors = torch.stack([weight.scales] if offsets is None else [weight.scales, offsets], dim=2)
        words = _words(weight)
        if weight.blocks is None:
            self._pack([factors, words])
        else:
            shape = (columns, weight.blocks.shape[1], -1)
            small = factors.unflatten(1, (-1, weight.blocked)).transpose(2, 3)  # type: ignore[no-untyped-call]
            self._pack([weight.blocks, small.reshape(shape), words.view(shape)])

    def _pack(self, pieces: Sequence[torch.Tensor]) -> None:
        """Make panels.

        Args:
            pieces: of each group, or super-block, what lies there one after the other [columns, groups, numbers], of
                float16, int8 or int32.
        """
        panel, padding = panel_columns(), (0, 0, 0, 0, 0, -self.columns % panel_columns())
        self._pieces = [(piece.dtype, piece.shape[2]) for piece in pieces]
        turned = [F.pad(piece, padding).view(-1, panel, *piece.shape[1:]).permute(0, 2, 3, 1) for piece in pieces]
        flat = [_fresh(each.reshape(*each.shape[:2], -1)).view(torch.int32) for each in turned]
        self._panels = torch.cat(flat, dim=2)
        groups = self._panels.shape[1] * max(self._kind[-1], 1)
        order = None if self._order is None else self._order.data_ptr()
        self.struct = Matrix(self._panels.data_ptr(), self._bias_address(), groups, self.columns, *self._kind, order)

    def part(self, columns: torch.Tensor) -> IntegerMatrix:
        """See `Packed.part`."""
        panel, (panels, groups, _) = panel_columns(), self._panels.shape
        sizes = [count * panel * dtype.itemsize // 4 for dtype, count in self._pieces]
        at = (columns // panel, slice(None), slice(None), columns % panel)
        parts = self._panels.split(sizes, dim=2)  # type: ignore[no-untyped-call]
        pieces = [
            _fresh(flat).view(dtype).view(panels, groups, count, panel)[at]
            for flat, (dtype, count) in zip(parts, self._pieces, strict=True)
        ]
        made = copy(self)
        made.columns, made._bias = len(columns), self._bias_of(columns)
        made._pack(pieces)
        return made


def _words(weight: IntegerWeight) -> torch.Tensor:
    """Integers as int32 [columns, groups, units], padded to whole groups; see `integers.h`."""
    codes = F.pad(weight.codes, (0, -weight.codes.shape[1] % weight.group)).view(torch.uint8)
    if weight.bits < 8:
        quads = codes.view(len(codes), -1, STEPS[weight.bits] // 4, 4)
        pairs = (quads & 15).unflatten(2, (-1, 2))  # type: ignore[no-untyped-call]
        codes = pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4
        if (upper := weight.bits - 4) > 0:
            parts = [quads[:, :, quad] >> 4 << upper * quad for quad in range(quads.shape[2])]
            codes = torch.cat([reduce(torch.bitwise_or, parts)[:, :, None], codes], dim=2)
    return _fresh(codes.reshape(len(codes), -1)).view(torch.int32).view(*weight.scales.shape, -1)


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with plain strides, which a contiguous tensor need not have in dimensions of 1."""
    return tensor.clone(memory_format=torch.contiguous_format)


def keeps(weight: IntegerWeight) -> bool:
    """Whether the kernels can multiply with it."""
    return weight.group % STEPS[weight.bits] == 0 and weight.group <= LARGEST_GROUP


def product_of(linears: Sequence[Any], dtype: torch.dtype, join: Join | None = None) -> Product:
    """Linear layers over the same input: as one packed weight if all are of one kind, else neighbours that are.

    Args:
        linears: see `matrix_of`.
        dtype: of activations.
        join: see `matrix_of`; it needs all to be of one kind, otherwise each is a weight of its own.
    """
    runs = [list(run) for _, run in groupby(linears, _kind_of)]
    if len(runs) == 1:
        return matrix_of(linears, dtype, torch.cat if join is None else join)
    if join is not None:
        runs = [[linear] for linear in linears]
    return Products([matrix_of(run, dtype) for run in runs])


def _kind_of(linear: Any) -> tuple[object, ...] | None:
    integers: IntegerWeight | None = getattr(linear, "integers", None)
    return None if integers is None else integers.kind


def matrix_of(linears: Sequence[Any], dtype: torch.dtype, join: Join = torch.cat) -> Packed:
    """Linear layers over the same input as one packed weight: of integers where all have such of one kind.

    Args:
        linears: with `weight` and `bias`, and perhaps `integers`, see `engine.integer_weights`.
        dtype: of activations.
        join: makes one of their weights, and one of their biases, [n, ...].
    """
    biases = [linear.bias for linear in linears if linear.bias is not None]
    bias = join(biases) if biases else None
    integers = [found for linear in linears if (found := getattr(linear, "integers", None)) is not None]
    whole = IntegerWeight.joined(integers, join) if len(integers) == len(linears) else None
    if whole is not None:
        return IntegerMatrix(whole, bias, dtype)
    return PackedMatrix(join([linear.weight for linear in linears]), bias)


def interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rows of both [n, width] in turns of half a panel, which then holds a gate and what it gates; n padded to it."""
    half = panel_columns() // 2
    pad = -gate.shape[0] % half
    both = [F.pad(part, (0, 0) * (part.dim() - 1) + (0, pad)) for part in (gate, up)]
    turns = torch.stack([part.view(-1, half, *part.shape[1:]) for part in both], dim=1)
    return turns.reshape(-1, *gate.shape[1:])


class NativeLinear(nn.Module):
    """A frozen linear layer over a packed weight."""

    def __init__(self, matrix: Packed) -> None:
        super().__init__()
        self.in_features = matrix.width
        self.out_features = matrix.columns
        self._matrix = matrix

    def part(self, ids: torch.Tensor) -> NativeLinear:
        """The layer of some output features (int64 [k])."""
        return NativeLinear(self._matrix.part(ids))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        rows = hidden.reshape(-1, self.in_features)
        return self._matrix(rows).view(*hidden.shape[:-1], self.out_features)


def native_linear(linear: nn.Module) -> nn.Module:
    """The layer over a packed weight where the kernels know its dtype, else the layer itself."""
    known = type(linear) is nn.Linear and linear.weight.dtype in (torch.bfloat16, torch.float32)
    if not known or linear.in_features % 2:  # type: ignore[operator]
        return linear
    return NativeLinear(matrix_of([linear], linear.weight.dtype))  # type: ignore[arg-type]
