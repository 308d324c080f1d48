"""The Llama family's layers over few rows on a CUDA device: matrix products, attention, and one kernel between two."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from decoding.partial_forward import LayerSelection
from decoding.read_spec import FEED_FORWARD
from engine.backends.cuda.paged_attention import power_of_two
from engine.backends.cuda.step import PagedStep
from engine.backends.llama_fused import LeanLayer
from engine.cache.paged_kv import PagedKV

GATE_TILE = 1024


def run(
    layers: list[LeanLayer],
    hidden: torch.Tensor,
    angles: torch.Tensor,
    step: PagedStep,
    depth: LayerSelection,
    taps: frozenset[int],
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """The residual stream after the layers, [rows, hidden], and where it is tapped.

    Args:
        layers: all of them, in order.
        hidden: [rows, hidden] what goes into the first that runs.
        angles: [rows, 2, head_dim] from `engine.backends.llama_fused.Angles`.
        step: the forward's attention; it knows the rows' slots.
        depth: which layers run; no groups.
        taps: see `engine.backends.stacks.LayerStack.hidden`.
    """
    added: torch.Tensor | None = None
    tapped = {depth.first: hidden} if depth.first in taps else {}
    for index, layer in enumerate(layers[depth.first : depth.last], start=depth.first):
        if 2 * index not in depth.skipped:
            hidden, normed = add_norm(hidden, added, layer.before_attention)
            query = rotate(layer, layer.qkv(normed), angles, step.store, step.metadata.slots)
            added = layer.out(step.attend_written(layer.index, query, layer.scores).view(len(hidden), -1))
        if 2 * index + 1 not in depth.skipped:
            hidden, normed = add_norm(hidden, added, layer.before_mlp)
            if FEED_FORWARD in taps and index + 1 == len(layers):
                tapped[FEED_FORWARD] = normed
            added = layer.down(gated(layer, layer.gate_up(normed)))
        if index + 1 in taps:
            tapped[index + 1] = hidden if added is None else hidden + added
    return (hidden if added is None else hidden + added), tapped


def add_norm(hidden: torch.Tensor, added: torch.Tensor | None, norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the two, and its RMS norm; all [rows, hidden].

    Args:
        hidden: the residual stream.
        added: what a sub-layer adds to it; None: nothing yet.
        norm: a norm module of the Llama family.
    """
    rows, width = hidden.shape
    total = hidden if added is None else torch.empty_like(hidden)
    normed = torch.empty_like(hidden)
    _kernels().add_norm_kernel[(rows,)](
        hidden,
        hidden if added is None else added,
        norm.weight,
        total,
        normed,
        norm.variance_epsilon,
        WIDTH=width,
        TILE=power_of_two(width),
        ADDS=added is not None,
        num_warps=8 if width > 1024 else 4,
    )
    return total, normed


def rotate(
    layer: LeanLayer, qkv: torch.Tensor, angles: torch.Tensor, store: PagedKV, slots: torch.Tensor
) -> torch.Tensor:
    """Rotated queries [rows, heads, head_dim]; rotated keys, and values, are written into the rows' slots.

    Args:
        layer: whose they are.
        qkv: [rows, (heads + 2 kv_heads) head_dim].
        angles: [rows, 2, head_dim].
        store: the cache.
        slots: int64 [rows]; negative: padding, which is not written.
    """
    heads, kv_heads, dim = layer.heads, layer.kv_heads, layer.head_dim
    query = torch.empty((len(qkv), heads, dim), dtype=qkv.dtype, device=qkv.device)
    query_norm, key_norm = layer.query_norm, layer.key_norm
    _kernels().rotate_kernel[(len(qkv), heads + 2 * kv_heads)](
        qkv,
        angles,
        qkv if query_norm is None else query_norm.weight,
        qkv if key_norm is None else key_norm.weight,
        slots,
        query,
        store.layers[layer.index],
        0.0 if query_norm is None else query_norm.variance_epsilon,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        TILE=power_of_two(dim),
        NORMED=query_norm is not None,
        num_warps=1,
    )
    return query


def gated(layer: LeanLayer, gate_up: torch.Tensor) -> torch.Tensor:
    """What goes into the down projection: the activated gate times up, [rows, 2 intermediate] -> [rows, intermediate].

    Args:
        layer: whose activation it is.
        gate_up: both projections.
    """
    rows, width = len(gate_up), gate_up.shape[1] // 2
    if layer.activation_name != "silu":
        gate, up = gate_up.chunk(2, dim=-1)
        activated: torch.Tensor = layer.activation(gate)
        return activated.mul_(up)
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    _kernels().gate_kernel[(rows, -(-width // GATE_TILE))](gate_up, out, WIDTH=width, TILE=GATE_TILE)
    return out


@cache
def _kernels() -> Any:
    """The kernels, imported when the first is launched: all else here works without Triton."""
    from engine.backends.cuda import fused_kernels

    return fused_kernels
