"""Runs of tokens that two prompts have in common, wherever they stand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

# Windows by which runs are found are not longer than this; longer runs are compared token by token from there.
WIDEST = 32
# Places of a window in the source that are tried.
MAX_TRIED = 8
_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Run:
    """Equal tokens: from `start` on in the new prompt, from `origin` on in the source."""

    start: int
    origin: int
    length: int


def window_hashes(tokens: Int64, width: int) -> UInt64:
    """Return [n - width + 1] hashes of all windows of `width` tokens, their bits well mixed; empty if n < width."""
    count = len(tokens) - width + 1
    if count < 1:
        return np.zeros(0, dtype=np.uint64)
    values = tokens.astype(np.uint64) + np.uint64(1)
    hashes = np.zeros(count, dtype=np.uint64)
    for place in range(width):
        hashes = hashes * _BASE + values[place : place + count]
    hashes ^= hashes >> np.uint64(30)
    hashes *= np.uint64(0xBF58476D1CE4E5B9)
    hashes ^= hashes >> np.uint64(27)
    hashes *= np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


def common_runs(target: Int64, source: Int64, available: npt.NDArray[np.bool_], least: int) -> list[Run]:
    """Disjoint runs of `target` that stand in `source`, left to right, each as long as it can be from where it starts.

    Runs may stand in any order in the source, and several may come from one place of it: unlike an edit script, which
    keeps the order, because moved keys do not care.

    Args:
        target: [n] token ids.
        source: [m] token ids.
        available: [m] tokens of the source that may be taken.
        least: shortest run, in tokens, at least 1.
    """
    width = min(least, WIDEST)
    hashes = window_hashes(source, width)
    if not len(hashes) or len(target) < least:
        return []
    ends = _ends(available)
    usable = np.flatnonzero(ends[: len(hashes)] - np.arange(len(hashes)) >= width)
    usable = usable[np.argsort(hashes[usable], kind="stable")]
    wanted = window_hashes(target, width)
    first = np.searchsorted(hashes[usable], wanted, "left")
    last = np.searchsorted(hashes[usable], wanted, "right")
    runs: list[Run] = []
    at = 0
    for start in np.flatnonzero(last > first).tolist():
        if start < at:
            continue
        places = usable[first[start] : last[start]]
        best = _longest(target, source, ends, start, _tried(places, start, runs))
        if best.length >= least:
            runs.append(best)
        # What starts within the window would have been found as part of this.
        at = start + max(best.length - width + 1, 1) if best.length < least else start + best.length
    return runs


def _ends(available: npt.NDArray[np.bool_]) -> Int64:
    """[m] end of the available stretch that each place lies in; the place itself where it is not available."""
    places = np.arange(len(available), dtype=np.int64)
    closed = np.where(available, len(available), places)
    return np.minimum.accumulate(closed[::-1])[::-1]


def _tried(places: Int64, start: int, runs: list[Run]) -> list[int]:
    """Some of the places, first the one that continues the run before."""
    if len(places) <= MAX_TRIED:
        return [int(place) for place in places]
    follows = start - (runs[-1].start - runs[-1].origin) if runs else start
    nearest = np.argsort(np.abs(places - follows), kind="stable")[:MAX_TRIED]
    return [int(place) for place in places[nearest]]


def _longest(target: Int64, source: Int64, ends: Int64, start: int, origins: list[int]) -> Run:
    lengths = [_extent(target[start:], source[origin : ends[origin]]) for origin in origins]
    length = max(lengths)
    return Run(start, origins[lengths.index(length)], length)


def _extent(mine: Int64, theirs: Int64) -> int:
    """How many tokens two stretches begin with in common."""
    most = min(len(mine), len(theirs))
    size = 64
    begin = 0
    while begin < most:
        end = min(begin + size, most)
        apart = np.flatnonzero(mine[begin:end] != theirs[begin:end])
        if len(apart):
            return begin + int(apart[0])
        begin, size = end, 2 * size
    return most
