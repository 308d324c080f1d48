"""Equal shares of a model's blocks for its tenants: who is within its share, and whose sequences give way."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from engine.cache.table import BlockTable


class BlockShares:
    """What the tenants of one model hold of its blocks while a step is planned; what is promised to them included.

    A tenant is entitled to an equal share of the blocks, and to one sequence of any length. Whoever has less than
    that may start at the cost of tenants above their shares, the furthest above first. Of these, the youngest
    sequence gives way; the oldest never does, nor one that has got no token since it last did. Who gave way would be
    above its share again with what it gave: it is never entitled to take that back.

    Args:
        tables: caches that hold blocks; of sequences that are in a hurry, or of those that are not.
        waiting: tenants that wait for blocks.
        num_blocks: what is shared.
    """

    def __init__(self, tables: Iterable[BlockTable], waiting: Iterable[str], num_blocks: int) -> None:
        self._tables: dict[str, list[BlockTable]] = {tenant: [] for tenant in waiting}
        for table in tables:
            self._tables.setdefault(table.seq.tenant, []).append(table)
        self._held = {tenant: _held(mine) for tenant, mine in self._tables.items()}
        self.share = num_blocks // max(len(self._tables), 1)

    def __len__(self) -> int:
        """Tenants."""
        return len(self._tables)

    def is_above(self, tenant: str) -> bool:
        """Whether it has more than its share."""
        return self._held.get(tenant, 0) > self.share

    def is_entitled(self, table: BlockTable, found: list[int], num_blocks: int) -> bool:
        """Whether a sequence that starts leaves its tenant within its share, or is its only one.

        Args:
            table: its cache; what it was promised before does not count.
            found: blocks it would share.
            num_blocks: blocks it needs, these included.
        """
        others = [other for other in self._tables.get(table.seq.tenant, ()) if other is not table]
        shared = set(found).intersection(*[{block for other in others for block in other.blocks}])
        return not others or _held(others) + num_blocks - len(shared) <= self.share

    def giving_way(self, tenant: str) -> Iterator[BlockTable]:
        """Sequences that give way to a tenant within its share, in this order, as long as others are above theirs."""
        held = {name: count for name, count in self._held.items() if name != tenant}
        may = {name: _may_give_way(self._tables[name]) for name in held}
        while True:
            above = [name for name, count in held.items() if count > self.share and may[name]]
            if not above:
                return
            name = max(above, key=held.__getitem__)
            table = may[name].pop()
            held[name] -= freed(table)
            yield table


def freed(table: BlockTable) -> int:
    """Blocks that others can have when a cache is given up, those that were promised to it included."""
    return sum(map(table.pool.is_exclusive, table.blocks)) + max(table.promised - len(table.blocks), 0)


def age(table: BlockTable) -> int:
    """Order of first use; a table nobody has used yet (a fresh fork) is the youngest."""
    return table.arrival if table.arrival is not None else sys.maxsize


def _held(tables: list[BlockTable]) -> int:
    distinct = {block for table in tables for block in table.blocks}
    return len(distinct) + sum(max(table.promised - len(table.blocks), 0) for table in tables)


def _may_give_way(tables: list[BlockTable]) -> list[BlockTable]:
    """All but the oldest, the youngest last."""
    by_age = sorted((table for table in tables if table.blocks), key=age)[1:]
    return [table for table in by_age if len(table.seq) > table.gave_way_at]
