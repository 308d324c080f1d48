"""Times with a store and without, compared."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tests.telling import tell


def p99(times: Sequence[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(times, n=100)[98]


def compared(name: str, with_store: Sequence[float], without: Sequence[float]) -> float:
    """Seconds that the 99th percentile of times is longer with a store than without; tells them."""
    added = p99(with_store) - p99(without)
    medians = [1e3 * statistics.median(times) for times in (with_store, without)]
    ends = [1e3 * p99(times) for times in (with_store, without)]
    tell(
        f"{name}: {len(with_store)} requests, median {medians[0]:.2f} ms with and {medians[1]:.2f} ms without a store,"
        f" p99 {ends[0]:.2f} and {ends[1]:.2f} ms: {1e3 * added:+.2f} ms"
    )
    return added
