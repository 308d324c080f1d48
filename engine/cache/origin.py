"""Origin of a block table's keys and values, and the observer of newly published blocks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.cache.table import BlockTable


@dataclass(slots=True)
class Origin:
    """Relation of a block table to caches outside its pool.

    Attributes:
        sought: whether these were asked for its prefix.
        fetched: tokens whose KV they had, and that were put into the pool.
        on_arrival: how many of these the sequence found when it started.
        watcher: called with the table and the number of its published blocks, once these are `watch_at` or more.
        watch_at: published blocks at which `watcher` is called next; `watcher` must raise it.
    """

    sought: bool = False
    fetched: range = range(0)
    on_arrival: int = 0
    watcher: Callable[[BlockTable, int], None] | None = None
    watch_at: int = sys.maxsize

    def arrived(self, cached: int) -> None:
        """Record the start of the sequence, which found `cached` tokens in the pool."""
        self.on_arrival = max(min(self.fetched.stop, cached) - self.fetched.start, 0)

    def published(self, table: BlockTable, count: int) -> None:
        """Record that `count` leading blocks can be found by content now."""
        if self.watcher is not None and count >= self.watch_at:
            self.watcher(table, count)

    def forked(self) -> Origin:
        """Return the origin of a fork that holds the same blocks."""
        return Origin(self.sought, range(0), 0, self.watcher, self.watch_at)
