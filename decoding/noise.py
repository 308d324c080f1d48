"""Keyed noise: random numbers that depend on (seed, position, purpose) and on nothing else.

A counter-based generator instead of a stream: the token at position t of a seeded request is the same alone or
in a batch, on any replica, under any drafter whose verifier takes the target's own sample. The mixer is
SplitMix64's finaliser (Steele, Lea, Flood 2014), evaluated at a counter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

Keys = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB
_FEW = 1 << 12  # numbers that numpy makes in less time than torch takes to be called


class Purpose(IntEnum):
    """Purpose of a random number; numbers of different purposes are independent."""

    SAMPLE = 1
    DRAFT = 2
    ACCEPT = 3
    RESIDUAL = 4
    SWITCH = 5
    LENGTH = 6
    SELECT = 7
    EXCLUDE = 8
    LANGEVIN = 9


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _M1) & _MASK
    x = ((x ^ (x >> 27)) * _M2) & _MASK
    return x ^ (x >> 31)


def noise_key(seed: int, position: int, purpose: Purpose, lane: int = 0) -> int:
    """64-bit key of one draw. `lane` tells apart draws of one purpose at one position (siblings in a tree)."""
    key = _mix((seed + _GOLDEN) & _MASK)
    key = _mix((key + position * _GOLDEN) & _MASK)
    return _mix((key + (purpose * 0x10001 + lane + 1) * _GOLDEN) & _MASK)


def seed_keys(seeds: Iterable[int]) -> Keys:
    """Return what `noise_keys` takes of seeds, which stays the same at all positions."""
    return _mixed(np.array([(seed + _GOLDEN) & _MASK for seed in seeds], dtype=np.uint64))


def noise_keys(seeds: Keys, positions: npt.NDArray[np.int64], purpose: Purpose) -> Keys:
    """`noise_key` of many rows at once.

    Args:
        seeds: uint64 [rows], of `seed_keys`.
        positions: [rows].
        purpose: of all.
    """
    key = _mixed(seeds + positions.astype(np.uint64) * np.uint64(_GOLDEN))
    return _mixed(key + np.uint64((purpose * 0x10001 + 1) * _GOLDEN & _MASK))


def _mixed(x: Keys) -> Keys:
    """`_mix` of each; products wrap modulo 2**64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_M1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_M2)
    return x ^ (x >> np.uint64(31))


def uniform(key: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    return (_mix((key + _GOLDEN) & _MASK) >> 11) * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """Seed of the index-th answer of a request; index 0 keeps the request's own."""
    return seed if index == 0 else _mix((seed + index * _GOLDEN) & _MASK) >> 1


def round_seed(seed: int, root: int) -> int:
    """Seed of the draft noise of one round, named by the position its draft begins at.

    For drafters that draw a position again in later rounds, after what was drawn there had a say in what else was.
    """
    return _mix((~seed + (root + 1) * _GOLDEN) & _MASK) >> 1


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def gumbel(keys: list[int] | Keys, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise for every token of every row.

    Args:
        keys: one key a row.
        vocab_size: columns.
        device: where the noise is made.

    Returns:
        float32 [rows, vocab_size]. `argmax(logits + noise)` is a sample of softmax(logits).
    """
    return _uniforms(keys, vocab_size, device).log_().neg_().log_().neg_().to(torch.float32)


def normal(keys: list[int] | Keys, size: int, device: torch.device) -> torch.Tensor:
    """Standard normal noise: float32 [rows, size]; arguments as of `gumbel`."""
    return _uniforms(keys, size, device).mul_(2.0).sub_(1.0).erfinv_().mul_(math.sqrt(2.0)).to(torch.float32)


def _uniforms(keys: list[int] | Keys, size: int, device: torch.device) -> torch.Tensor:
    """Numbers in (0, 1): float64 [rows, size]."""
    numbers = np.array(keys, dtype=np.uint64)
    if device.type == "cpu" and numbers.size * size <= _FEW:
        mixed = _mixed(numbers[:, None] + np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_GOLDEN))
        return torch.from_numpy(((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53)
    rows = torch.from_numpy(numbers.view(np.int64)).to(device)
    counter = torch.arange(1, size + 1, dtype=torch.int64, device=device) * _signed(_GOLDEN)
    x = rows[:, None] + counter  # wraps modulo 2**64, as the generator asks
    # In place: at large vocabularies the time goes into memory, not arithmetic.
    for shift, factor in ((30, _M1), (27, _M2)):
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(_signed(factor))
    x.bitwise_xor_((x >> 31).bitwise_and_((1 << 33) - 1))
    return x.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1).to(torch.float64).add_(0.5).mul_(2.0**-53)
