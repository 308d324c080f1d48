"""Where the keys and values of a table came from, and who is told of new ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.cache.table import BlockTable


@dataclass(slots=True)
class Origin:
    """What a table has to do with caches outside its pool.

    Attributes:
        sought: whether these were asked for its prefix.
        fetched: tokens whose KV they had, and that were put into the pool.
        on_arrival: how many of these the sequence found when it started.
        watcher: called with the number of its blocks that are published,
        watch_at: ... when there are so many; it must move this on.
    """

    sought: bool = False
    fetched: range = range(0)
    on_arrival: int = 0
    watcher: Callable[[BlockTable, int], None] | None = None
    watch_at: int = sys.maxsize

    def arrived(self, cached: int) -> None:
        """The sequence starts, with so many tokens found in the pool."""
        self.on_arrival = max(min(self.fetched.stop, cached) - self.fetched.start, 0)

    def published(self, table: BlockTable, count: int) -> None:
        """So many of its leading blocks can be found by content now."""
        if self.watcher is not None and count >= self.watch_at:
            self.watcher(table, count)

    def forked(self) -> Origin:
        """Of a twin that holds the same blocks."""
        return Origin(self.sought, range(0), 0, self.watcher, self.watch_at)
