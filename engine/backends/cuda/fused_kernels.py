"""Triton kernels for what stands between a layer's matrix products, each in one pass over its rows.

At few rows a layer is bound by its number of kernels, not by their arithmetic. Everything is computed in float32 and
rounded where it is stored. The values in capitals are known when a kernel is compiled.
"""

import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(
    hidden,  # [rows, WIDTH]
    added,  # [rows, WIDTH]; unused where there is nothing to add
    weight,  # [WIDTH]
    total,  # [rows, WIDTH], written where something is added
    normed,  # [rows, WIDTH]
    eps,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,  # power of two not below WIDTH
    ADDS: tl.constexpr,
):
    """The residual stream after a sub-layer, and its RMS norm; grid (rows)."""
    column = tl.arange(0, TILE)
    inside = column < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + column
    value = tl.load(hidden + place, mask=inside, other=0.0)
    if ADDS:
        more = tl.load(added + place, mask=inside, other=0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(value.dtype)
        tl.store(total + place, value, mask=inside)
    exact = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact, 0) / WIDTH + eps)
    scaled = exact * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + place, scaled.to(value.dtype), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def rotate_kernel(
    qkv,  # [rows, HEADS + 2 * KV_HEADS, DIM]: queries, keys, values
    angles,  # [rows, 2, DIM]: cosines and signed sines
    query_norm,  # [DIM]; unused unless NORMED
    key_norm,  # [DIM]; unused unless NORMED
    slots,  # int64 [rows]; a row whose slot is negative is padding
    query,  # [rows, HEADS, DIM], written
    cache,  # [slots, 2, KV_HEADS, DIM], written at the rows' slots
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,  # power of two not below DIM
    NORMED: tl.constexpr,
):
    """Norm (where the model has one) and rotate queries and keys; keys and values go into their slots.

    Grid: (rows, HEADS + 2 * KV_HEADS).
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, TILE)
    inside = column < DIM
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * DIM
    stored = tl.load(source + column, mask=inside, other=0.0)
    value = stored.to(tl.float32)
    if head < HEADS + KV_HEADS:
        partner = tl.where(column < DIM // 2, column + DIM // 2, column - DIM // 2)
        other = tl.load(source + partner, mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            scale = tl.rsqrt(tl.sum(value * value, 0) / DIM + eps)
            weight = query_norm if head < HEADS else key_norm
            value = value * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
            other = other * scale * tl.load(weight + partner, mask=inside, other=0.0).to(tl.float32)
        cosine = tl.load(angles + row * (2 * DIM) + column, mask=inside, other=0.0).to(tl.float32)
        sine = tl.load(angles + row * (2 * DIM) + DIM + column, mask=inside, other=0.0).to(tl.float32)
        value = value * cosine + other * sine
    if head < HEADS:
        tl.store(query + (row * HEADS + head) * DIM + column, value.to(stored.dtype), mask=inside)
    else:
        slot = tl.load(slots + row)
        if slot >= 0:
            place = (slot * (2 * KV_HEADS) + head - HEADS) * DIM
            tl.store(cache + place + column, value.to(stored.dtype), mask=inside)


@triton.jit
def gate_kernel(gate_up, out, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """SiLU of the gate times up: [rows, 2 * WIDTH] -> [rows, WIDTH]; grid (rows, tiles of a row)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * (2 * WIDTH) + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    exact = gate.to(tl.float32)
    tl.store(out + row * WIDTH + column, (exact * tl.sigmoid(exact) * up).to(gate.dtype), mask=inside)
