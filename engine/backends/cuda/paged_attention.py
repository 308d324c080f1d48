"""Launching the kernels: how a batch's attention is cut into programs, and the calls themselves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from engine.attention.step import Scores
from engine.backends.cuda.metadata import Metadata

# The matrix units take 16 rows at least; beyond 64, registers run short. float32 has no matrix units to feed.
MIN_ROWS = 16
MAX_ROWS = 64
MAX_SPLITS = 64
# A part of the keys shorter than this costs more to merge than it saves. This and what follows was measured on an H100
# with heads of 128 in bfloat16, one to 64 sequences, 512 and 8192 keys.
MIN_SPLIT_KEYS = 64
KEYS = 32
WARPS, STAGES = 4, 2
WRITE_TILE = 1024
# Programs per multiprocessor that keep its memory pipes busy; those of `MAX_ROWS` hold more registers.
PROGRAMS, LARGE_PROGRAMS = 4, 2


@dataclass(frozen=True, slots=True)
class Reach:
    """What one launch must cover.

    Attributes:
        rows: fed tokens of all sequences, at most.
        sequences: that have rows; an estimate where it is not known.
        fed: tokens one sequence feeds, at most.
        keys: keys one sequence has, at most.
    """

    rows: int
    sequences: int
    fed: int
    keys: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """How attention is cut into programs.

    Attributes:
        rows: query rows of a program, fed tokens x query heads of a KV head.
        row_tiles: programs that cover a sequence's query rows.
        splits: parts the keys are cut into, a power of two (flash decoding).
    """

    rows: int
    row_tiles: int
    splits: int


def tile(reach: Reach, cache: torch.Tensor, group: int, processors: int, window: int | None) -> Tiling:
    """Choose a tiling: as few row tiles as registers allow, as many splits as fill the device.

    Args:
        reach: of the batch.
        cache: [slots, 2, kv_heads, dim].
        group: query heads of each KV head.
        processors: multiprocessors of the device.
        window: of the layer; keys beyond it are never read.
    """
    kv_heads = cache.shape[2]
    wanted = reach.fed * group
    rows = min(max(power_of_two(wanted), MIN_ROWS), MAX_ROWS if cache.element_size() == 2 else MIN_ROWS)
    row_tiles = -(-wanted // rows)
    keys = reach.keys if window is None else min(reach.keys, window + reach.fed)
    busy = max(reach.sequences, -(-reach.rows * group // rows)) * kv_heads
    free = (LARGE_PROGRAMS if rows == MAX_ROWS else PROGRAMS) * processors // busy
    splits = min(free, keys // MIN_SPLIT_KEYS, MAX_SPLITS)
    return Tiling(rows, row_tiles, 1 << max(splits, 1).bit_length() - 1)


def write(cache: torch.Tensor, slots: torch.Tensor, pairs: torch.Tensor) -> None:
    """Put new keys and values into their slots; rows with a negative slot are left out.

    Args:
        cache: [slots, 2, kv_heads, dim], contiguous.
        slots: int64 [rows].
        pairs: [rows, 2, kv_heads, dim]; a row is contiguous.
    """
    row = pairs[0].numel()
    grid = (len(pairs), -(-row // WRITE_TILE))
    _kernels().write_kernel[grid](pairs, cache, slots, pairs.stride(0), ROW=row, TILE=WRITE_TILE)


def attend(
    query: torch.Tensor, cache: torch.Tensor, metadata: Metadata, scores: Scores, tiling: Tiling, block_size: int
) -> torch.Tensor:
    """Attend over each row's own slots, float32 inside; rows of no sequence come back undefined.

    Args:
        query: [rows, heads, dim], the last dimension contiguous.
        cache: [slots, 2, kv_heads, dim], contiguous; the rows' own keys have been written.
        metadata: of the batch.
        scores: scale, window, soft cap.
        tiling: covers every sequence's fed tokens.
        block_size: tokens of a block.

    Returns:
        [rows, heads, dim], contiguous.
    """
    rows, heads, dim = query.shape
    kv_heads = cache.shape[2]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    target, weight = out, out
    if tiling.splits > 1:
        target = torch.empty((tiling.splits, *query.shape), dtype=torch.float32, device=query.device)
        weight = torch.empty((tiling.splits, rows, heads), dtype=torch.float32, device=query.device)
    tile_dim = max(power_of_two(dim), 16)
    _kernels().attend_kernel[(len(metadata.lengths), tiling.row_tiles * tiling.splits, kv_heads)](
        query,
        cache,
        target,
        weight,
        metadata.positions,
        metadata.starts,
        metadata.lengths,
        metadata.tree_sizes,
        metadata.tree_masks,
        metadata.blocks,
        rows,
        metadata.blocks.shape[1],
        tiling.splits,
        query.stride(0),
        query.stride(1),
        scores.scaling,
        SOFTCAP=scores.softcap or 0.0,
        WINDOW=scores.window or 0,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        DIM=dim,
        TILE_DIM=tile_dim,
        BLOCK_SIZE=block_size,
        ROWS=tiling.rows,
        KEYS=KEYS,
        IS_SPLIT=tiling.splits > 1,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    if tiling.splits > 1:
        _kernels().merge_kernel[(rows, heads)](
            target, weight, out, rows, HEADS=heads, DIM=dim, TILE_DIM=tile_dim, SPLITS=tiling.splits
        )
    return out


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below it."""
    return 1 << (number - 1).bit_length()


@cache
def _kernels() -> Any:
    """The kernels, imported when the first is launched: all else here works without Triton."""
    from engine.backends.cuda import kernels

    return kernels
