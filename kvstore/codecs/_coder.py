"""Entropy coding: asymmetric numeral systems by the library constriction, with a table for every row of symbols.

A table's probabilities are made from small whole numbers by exact arithmetic only, so that every reader of a stream has
the very table it was written with, on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import constriction
import numpy as np
from numpy.typing import NDArray

from kvstore.profiles import Bytes, Ints, cell_weights

Symbols = NDArray[np.int32]
Words = NDArray[np.uint32]
Table = Any  # a model of constriction's
Categorical = constriction.stream.model.Categorical
AnsCoder = constriction.stream.stack.AnsCoder
FINE = 256  # parts of a cell that an edge may lie between
LEAST_SHARE = 16  # an unseen symbol gets 2 ** -16 of a table


def symbol_weights(cells: Bytes, edges: Ints) -> Ints:
    """Return weights of symbols that are intervals of a histogram.

    Args:
        cells: [rows, cells] of `kvstore.profiles.cell_bytes`.
        edges: [rows, symbols + 1] where each symbol begins and the last ends, in 1/256 of a cell from the first cell
            on, rising; what lies beyond the cells belongs to the first and the last symbol.

    Returns:
        [rows, symbols], each above 0.
    """
    weights = cell_weights(cells)
    rows, num = weights.shape
    ends = np.zeros((rows, num + 1), dtype=np.int64)
    np.cumsum(weights, axis=1, out=ends[:, 1:])
    edges = np.clip(edges, 0, num * FINE)
    edges[:, 0], edges[:, -1] = 0, num * FINE
    cell = np.minimum(edges // FINE, num - 1)
    below = np.take_along_axis(ends, cell, 1) * FINE + np.take_along_axis(weights, cell, 1) * (edges - cell * FINE)
    found: Ints = np.diff(below, axis=1) + (ends[:, -1:] * FINE >> LEAST_SHARE) + 1
    return found


def entropy_bits(weights: Ints) -> float:
    """Return the mean bits of one symbol of every row, if symbols come as often as weights [rows, symbols] say."""
    shares = weights / weights.sum(1, keepdims=True)
    return float(-(shares * np.log2(shares)).sum())


def make_tables(weights: Ints) -> list[Table]:
    """Return a table for every row of weights [rows, symbols]."""
    # Sums of whole numbers below 2**53 are exact in float64, and the fast way rounds by products and floors alone.
    return [Categorical(row, perfect=False) for row in weights.astype(np.float64)]


def encode(parts: Sequence[tuple[Symbols, Sequence[Table]]]) -> Words:
    """Encode several arrays of symbols [rows, n] as one stream, row by row, each row with its table."""
    coder = AnsCoder()
    for symbols, tables in reversed(parts):  # what is written last is read first
        for row, table in zip(symbols[::-1], reversed(tables), strict=True):
            coder.encode_reverse(row, table)
    words: Words = coder.get_compressed()
    return words


def decode(words: Words, parts: Sequence[tuple[Symbols, Sequence[Table]]]) -> None:
    """Fill arrays of symbols [rows, n] from a stream that `encode` made of such arrays.

    Raises:
        ValueError: it is no such stream.
    """
    coder = AnsCoder(words)
    for symbols, tables in parts:
        count = symbols.shape[1]
        for row, table in zip(symbols, tables, strict=True):
            row[:] = coder.decode(table, count)
    if not coder.is_empty():
        raise ValueError("a stream with more in it than its symbols")
