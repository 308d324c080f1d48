"""Linear weights in the layout the CPU's matrix kernels like best: packed once at load, not at every call.

On CPU in bfloat16, oneDNN reads a packed weight at memory speed for 1 to 16 rows, where the plain layout costs
about twice that. Elsewhere the modules stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

TYPICAL_ROWS = 8


class PackedLinear(nn.Module):
    """A frozen linear layer over a packed weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), TYPICAL_ROWS)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self._packed, self.bias, "none", [], "")
        return result

    def part(self, ids: torch.Tensor) -> nn.Module:
        """The layer of some output features (int64 [k])."""
        return packed(_linear(self._packed.to_dense()[ids], self.bias, ids))


def packs(dtype: torch.dtype) -> bool:
    """Whether packing weights of this type helps on this machine: bfloat16, where oneDNN has kernels for it."""
    return dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packed(linear: nn.Module) -> nn.Module:
    """The layer over a packed weight where that helps, else the layer itself."""
    if type(linear) is not nn.Linear:
        return linear
    helps = linear.weight.device.type == "cpu" and packs(linear.weight.dtype)
    return PackedLinear(linear) if helps else linear


def linear_part(layer: nn.Module, ids: torch.Tensor) -> nn.Module | None:
    """Some output features (int64 [k]) of a linear layer, packed or not; None where it is no such layer."""
    if type(layer) is nn.Linear:
        return _linear(layer.weight.detach()[ids.to(layer.weight.device)], layer.bias, ids)
    part: Callable[[torch.Tensor], nn.Module] | None = getattr(layer, "part", None)
    return None if part is None else part(ids)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor) -> nn.Linear:
    """A frozen layer over rows of another one's weight, and its bias."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach()[ids.to(bias.device)], requires_grad=False)
    return made


def pack_linears(module: nn.Module, pack: Callable[[nn.Module], nn.Module] = packed) -> None:
    """Replace every linear layer inside a module, in place."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, pack(child))
