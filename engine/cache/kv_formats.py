"""How a block pool keeps keys and values: as the model computes them, or as bytes with a scale for each head.

A byte format keeps a head of a token as `head_dim` signed integers followed by the bytes of the float32 they count in.
Whatever copies slots copies the scales with them, and nothing that is kept depends on other tokens: a token's bytes are
the same however its prompt was cut, and whatever was drafted after it.
"""

from __future__ import annotations

from typing import Literal

import torch

KVDtype = Literal["auto", "int8"]

MOST_CODE = 127
LEAST_SCALE = 2.0**-100  # what is smaller than that is zero to any model
SCALE_BYTES = 4


def stored_dtype(kv_dtype: KVDtype, dtype: torch.dtype) -> torch.dtype:
    """The numbers that slots are made of.

    Args:
        kv_dtype: as `models.NAME.kv_dtype`.
        dtype: of the model.
    """
    return torch.int8 if kv_dtype == "int8" else dtype


def stored_width(kv_dtype: KVDtype, head_dim: int) -> int:
    """How many of them a head takes, its scale included."""
    return head_dim + SCALE_BYTES if kv_dtype == "int8" else head_dim


def head_bytes(kv_dtype: KVDtype, head_dim: int, itemsize: int) -> int:
    """Memory of one head's keys or values of one token, bytes.

    Args:
        kv_dtype: as `models.NAME.kv_dtype`.
        head_dim: width of a head.
        itemsize: bytes of a number of the model.
    """
    return stored_width(kv_dtype, head_dim) * (1 if kv_dtype == "int8" else itemsize)


def quantize(heads: torch.Tensor) -> torch.Tensor:
    """Round heads to integers from -127 to 127, symmetric, in steps of a 127th of each head's largest magnitude.

    A head in which a number is not finite is kept as one of which nothing is a number.

    Args:
        heads: [..., head_dim], of a model's dtype.

    Returns:
        int8 [..., head_dim + `SCALE_BYTES`].
    """
    wide = heads.float()
    scales = (wide.abs().amax(-1, keepdim=True) / MOST_CODE).clamp_min(LEAST_SCALE)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    codes = (wide / scales).nan_to_num(0.0).round_().to(torch.int8)
    return torch.cat([codes, scales.view(torch.int8)], dim=-1)


def dequantize(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Make numbers of what `quantize` gave.

    Args:
        stored: int8 [..., head_dim + `SCALE_BYTES`].
        dtype: of the numbers.

    Returns:
        [..., head_dim].
    """
    scales = stored[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (stored[..., :-SCALE_BYTES] * scales).to(dtype)
