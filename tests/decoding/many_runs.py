"""What lets a law over three tokens be played 200,000 times: the library's noise, without torch's cost of a call."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
import torch

from decoding import noise

SHIFTS = [np.uint64(bits) for bits in (30, 27, 31, 11)]
FACTORS = [np.uint64(factor) for factor in (noise._M1, noise._M2)]


@cache
def _counter(vocab_size: int) -> np.ndarray:
    return np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(noise._GOLDEN)


def gumbel(keys: list[int], vocab_size: int, device: torch.device) -> torch.Tensor:
    """The same numbers as `decoding.noise.gumbel`, a fourth of the time for one row of three."""
    x = np.array(keys, dtype=np.uint64)[:, None] + _counter(vocab_size)
    for shift, factor in zip(SHIFTS[:2], FACTORS, strict=True):
        x ^= x >> shift
        x *= factor
    x ^= x >> SHIFTS[2]
    u = ((x >> SHIFTS[3]).astype(np.float64) + 0.5) * 2.0**-53
    return torch.from_numpy(-np.log(-np.log(u))).to(device, torch.float32)


@contextmanager
def many_runs() -> Iterator[None]:
    """Within it all drafters and verifiers draw by this file's `gumbel`, and torch keeps no book for gradients."""
    original = noise.gumbel
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith(("decoding.", "tests.decoding.")) and vars(module).get("gumbel") is original:
                patch.setattr(module, "gumbel", gumbel)
        yield
