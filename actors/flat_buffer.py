"""Several tensors as one run of bytes, and back: one transfer, whatever their number, shapes and dtypes."""

from __future__ import annotations

import math

import torch

Meta = tuple[tuple[int, ...], torch.dtype]

ALIGNMENT = 64  # bytes; of each tensor's start: any dtype may be viewed from there


def meta_of(tensor: torch.Tensor) -> Meta:
    """What a receiver must know of a tensor: (shape, dtype)."""
    return tuple(tensor.shape), tensor.dtype


def parcel_bytes(metas: list[Meta]) -> int:
    """Bytes that tensors of these shapes and dtypes take in a parcel."""
    return _starts(metas)[-1] if len(metas) != 1 else _nbytes(metas[0])


def pack(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Tensors as one run of bytes: uint8 [parcel_bytes] on `device`.

    A single dense tensor that lies there already is not copied.
    """
    if len(tensors) == 1:
        return _bytes_of(tensors[0].to(device))
    starts = _starts([meta_of(tensor) for tensor in tensors])
    parcel = torch.empty(starts[-1], dtype=torch.uint8, device=device)
    for tensor, start in zip(tensors, starts, strict=False):
        if tensor.numel():
            parcel[start : start + tensor.nbytes] = _bytes_of(tensor.to(device))
    return parcel


def unpack(parcel: torch.Tensor, metas: list[Meta]) -> list[torch.Tensor]:
    """The tensors in a parcel; they share its memory.

    Args:
        parcel: uint8 [parcel_bytes].
        metas: shape and dtype of each.
    """
    starts = [0, len(parcel)] if len(metas) == 1 else _starts(metas)
    tensors = []
    for (shape, dtype), start in zip(metas, starts, strict=False):
        size = _nbytes((shape, dtype))
        part = parcel[start : start + size]
        tensors.append(part.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype, device=parcel.device))
    return tensors


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.view(-1).view(torch.uint8)


def _nbytes(meta: Meta) -> int:
    shape, dtype = meta
    return math.prod(shape) * dtype.itemsize


def _starts(metas: list[Meta]) -> list[int]:
    """Where each begins, and the end of all."""
    starts = [0]
    for meta in metas:
        starts.append(starts[-1] + -(-_nbytes(meta) // ALIGNMENT) * ALIGNMENT)
    return starts
