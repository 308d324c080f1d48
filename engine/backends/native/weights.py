"""Weights packed into panels, and a linear layer over them."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import nn

from engine.backends.native.library import Matrix, library, panel_columns


class PackedMatrix:
    """A linear layer's weight [columns, width] in the layout of `matrix.h`: panels of `panel_columns()` columns.

    Args:
        weight: [columns, width], bfloat16 or float32.
        bias: [columns].
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.columns, self.width = weight.shape
        self.dtype = weight.dtype
        per_unit, panel = 4 // weight.element_size(), panel_columns()
        padded = F.pad(weight.detach(), (0, -self.width % per_unit, 0, -self.columns % panel))
        units = padded.shape[1] // per_unit
        panels = padded.view(-1, panel, units, per_unit).transpose(1, 2)
        self._panels = panels.contiguous()
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self.struct = Matrix(
            self._panels.data_ptr(), None if self._bias is None else self._bias.data_ptr(), units, self.columns
        )

    def part(self, columns: torch.Tensor) -> PackedMatrix:
        """Some columns (int64 [k]), packed anew."""
        panel = self._panels.shape[2]
        weight = self._panels[columns // panel, :, columns % panel].reshape(len(columns), -1)[:, : self.width]
        return PackedMatrix(weight, None if self._bias is None else self._bias[columns])

    def __call__(self, rows: torch.Tensor, wide: bool = False) -> torch.Tensor:
        """[R, width] -> [R, columns], in the weight's dtype or, `wide`, in float32."""
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


def interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rows of both [n, width] in turns of half a panel, which then holds a gate and what it gates; n padded to it."""
    half = panel_columns() // 2
    pad = -gate.shape[0] % half
    both = [F.pad(part, (0, 0) * (part.dim() - 1) + (0, pad)) for part in (gate, up)]
    turns = torch.stack([part.view(-1, half, *part.shape[1:]) for part in both], dim=1)
    return turns.reshape(-1, *gate.shape[1:])


class NativeLinear(nn.Module):
    """A frozen linear layer over a packed weight."""

    def __init__(self, matrix: PackedMatrix) -> None:
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
    return NativeLinear(PackedMatrix(linear.weight, linear.bias))  # type: ignore[arg-type]
