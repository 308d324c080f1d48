"""Rows of which few tokens are left, shortened to these: what acts after a truncation need not read a vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch

# Tokens that shortened rows have. A row gets the least that it fits in, whatever rows are next to it: the last bits of
# sums over it depend on how long it is.
SIZES = (64, 512, 4096)
LEAST_GAIN = 8  # a row is shortened to one part of these, or less


@dataclass(frozen=True, slots=True)
class Shortened:
    """Rows of one size.

    Attributes:
        rows: which ones of the logits.
        values: float32 [rows, size], the logits that are left, in the order of their tokens; then -inf.
    """

    rows: list[int]
    values: torch.Tensor
    _tokens: torch.Tensor
    _slots: torch.Tensor

    def put_back(self, values: torch.Tensor, logits: torch.Tensor) -> None:
        """Write what became of the values into the logits, in which the other tokens are excluded already."""
        logits.view(-1)[self._tokens] = values.reshape(-1)[self._slots]


def shortened(logits: torch.Tensor, rows: Rows[int]) -> Iterator[Shortened]:
    """Find those of the rows that can be shortened.

    Args:
        logits: float32 [rows, vocab], contiguous, in the memory of the processor.
        rows: to look at.
    """
    vocab, numbers = logits.shape[-1], np.asarray(rows)
    whole = logits.detach() if len(rows) == len(logits) else logits.detach()[torch.from_numpy(numbers)]
    left = whole.numpy() > -np.inf
    counts = np.array([np.count_nonzero(row) for row in left])
    sizes = [size for size in SIZES if size * LEAST_GAIN <= vocab]
    fits = np.searchsorted(sizes, counts)  # the first that is enough
    for number, size in enumerate(sizes):
        [mine] = np.nonzero(fits == number)
        if not len(mine):
            continue
        chosen = left if len(mine) == len(left) else left[mine]
        flat = np.flatnonzero(chosen)
        row, many = flat // vocab, counts[mine]
        slots = np.arange(len(flat)) + np.repeat(np.arange(len(mine)) * size - (many.cumsum() - many), many)
        tokens = torch.from_numpy(flat + (numbers[mine][row] - row) * vocab)
        values = logits.new_full((len(mine), size), -torch.inf)
        places = torch.from_numpy(slots)
        values.view(-1)[places] = logits.view(-1)[tokens]
        yield Shortened(numbers[mine].tolist(), values, tokens, places)
