"""Fair shares for the tenants of a device: of its time, of a model's blocks, and for low-priority operations.

Time: each tenant with waiting operations is entitled to 1/n of each step, where the unit is a step of its rows alone: a
shared step takes at most n times that. Time that a tenant did not get, because a step of others was running when it
arrived or because a row did not fit, is owed to it and returned over the next steps: the others' parts are smaller
meanwhile, by half at most, so that their running requests advance. A tenant that gets more than its part because no
other tenant wants it owes nothing. The counters are those of the virtual token counter (Sheng et al. 2024, Fairness in
Serving Large Language Models), in predicted seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from math import inf

from engine.cache.table import BlockTable

# Balances are bounded: a wrong prediction must not give a tenant the device, or keep it away, for long.
LARGEST_BALANCE_S = 1.0
# Steps end a little early: predictions err, and time passes between steps.
MARGIN = 0.9
# Factor applied to a balance after each step in which its tenant had nothing waiting.
FADING = 0.9


class FairShare:
    """Balances of the tenants of one device: seconds that each is behind its share of time."""

    def __init__(self) -> None:
        self._balances: dict[str, float] = {}

    def balance(self, tenant: str) -> float:
        """Return the seconds that a tenant is behind its share; negative: ahead of it."""
        return self._balances.get(tenant, 0.0)

    def owed(self, tenant: str) -> float:
        """Return the seconds that are owed to a tenant."""
        return max(self._balances.get(tenant, 0.0), 0.0)

    def longest_step(self, here: Mapping[str, float], elsewhere: Mapping[str, float]) -> float:
        """Return the seconds that the next step of one model may take.

        For a tenant that is owed nothing, that is n times its own step. Where time is owed it is less, until the
        tenant has caught up, but the others keep at least half of what they would have.

        Args:
            here: seconds that each tenant's rows would take in a step of their own.
            elsewhere: the same for tenants that wait for other models only: their own step is still to come.

        Returns:
            Infinity with fewer than two tenants.
        """
        owed = {tenant: self.owed(tenant) for tenant in (*here, *elsewhere)}
        return _longest_step(here, elsewhere, owed)

    def charge(self, got: Mapping[str, float], active: Collection[str], seconds: float) -> None:
        """Account for a step.

        Args:
            got: seconds that the tokens fed for each tenant would have taken in a step of their own.
            active: tenants that had operations waiting.
            seconds: duration of the step, by the same prediction.
        """
        absent = self._balances.keys() - set(active) if len(active) > 1 else set(self._balances)
        for tenant in absent:
            self._balances[tenant] *= FADING
            if abs(self._balances[tenant]) < 1e-6:
                del self._balances[tenant]
        if len(active) > 1:
            share = seconds / len(active)
            for tenant in active:
                balance = self.balance(tenant) + share - got.get(tenant, 0.0)
                self._balances[tenant] = min(max(balance, -LARGEST_BALANCE_S), LARGEST_BALANCE_S)
            # Rows share the fixed cost of a step, so that all tenants may get more than their shares: that is no debt.
            spare = min(max(self._balances[tenant] for tenant in active), 0.0)
            for tenant in active:
                self._balances[tenant] -= spare


def usual_step(here: Mapping[str, float], elsewhere: Mapping[str, float]) -> float:
    """Return the seconds that the next step may take when nothing is owed; see `FairShare.longest_step`."""
    return _longest_step(here, elsewhere, {})


def _longest_step(here: Mapping[str, float], elsewhere: Mapping[str, float], owed: Mapping[str, float]) -> float:
    n = len(here) + len(elsewhere)
    if n < 2:
        return inf

    def bears(tenant: str, seconds: float) -> float:
        usual = MARGIN * n * seconds
        return max(usual - MARGIN * n * owed.get(tenant, 0.0), (seconds + usual) / 2)

    limits = [bears(tenant, seconds) for tenant, seconds in here.items()]
    limits += [bears(tenant, seconds) - seconds for tenant, seconds in elsewhere.items()]
    return max(min(limits), 0.0)


class MinimumShare:
    """Minimum share of a device's time for low-priority operations while interactive ones wait.

    Args:
        share: of the time, at least 0 and less than 1; 0: none.
    """

    def __init__(self, share: float = 0.0) -> None:
        self.share = share
        self._owed_s = 0.0

    @property
    def due(self) -> bool:
        """Whether low-priority operations are behind their share."""
        return self._owed_s > 0.0

    def charge(self, low_priority: bool, seconds: float) -> None:
        """Account for a step during which low-priority operations waited or ran."""
        part = -seconds if low_priority else self.share / (1.0 - self.share) * seconds
        self._owed_s = min(max(self._owed_s + part, -LARGEST_BALANCE_S), LARGEST_BALANCE_S)

    def forgo(self) -> None:
        """Drop what is owed: none of the operations can run."""
        self._owed_s = min(self._owed_s, 0.0)


class BlockShares:
    """Blocks that each tenant of one model holds or was promised while a step is planned, and its share of them.

    A tenant is entitled to an equal share of the blocks, and to one sequence of any length. If it holds less, its
    sequences may preempt those of tenants above their shares, furthest above first: the youngest sequence there, but
    never the oldest, nor one that got no token since it was last preempted. With the blocks it lost, the preempted
    tenant would be above its share again: so it is not entitled to take them back.

    Args:
        tables: caches that hold blocks, of one priority class.
        waiting: tenants that wait for blocks.
        num_blocks: blocks to share.
    """

    def __init__(self, tables: Iterable[BlockTable], waiting: Iterable[str], num_blocks: int) -> None:
        self._tables: dict[str, list[BlockTable]] = {tenant: [] for tenant in waiting}
        for table in tables:
            self._tables.setdefault(table.seq.tenant, []).append(table)
        self._held = {tenant: _held(mine) for tenant, mine in self._tables.items()}
        self.share = num_blocks // max(len(self._tables), 1)

    def __len__(self) -> int:
        """Return the number of tenants."""
        return len(self._tables)

    def is_above(self, tenant: str) -> bool:
        """Return whether a tenant holds more than its share."""
        return self._held.get(tenant, 0) > self.share

    def is_entitled(self, table: BlockTable, found: list[int], num_blocks: int) -> bool:
        """Return whether a sequence leaves its tenant within its share when it starts, or is its only one.

        Args:
            table: cache of the sequence; an earlier promise to it does not count.
            found: published blocks that it would share.
            num_blocks: blocks that it needs, including these.
        """
        others = [other for other in self._tables.get(table.seq.tenant, ()) if other is not table]
        shared = set(found).intersection(*[{block for other in others for block in other.blocks}])
        return not others or _held(others) + num_blocks - len(shared) <= self.share

    def preemptible(self, tenant: str) -> Iterator[BlockTable]:
        """Yield the sequences that a tenant within its share may preempt, in this order."""
        held = {name: count for name, count in self._held.items() if name != tenant}
        may = {name: _preemptible(self._tables[name]) for name in held}
        while True:
            above = [name for name, count in held.items() if count > self.share and may[name]]
            if not above:
                return
            name = max(above, key=held.__getitem__)
            table = may[name].pop()
            held[name] -= freed(table)
            yield table


def freed(table: BlockTable) -> int:
    """Return the number of blocks that dropping a cache makes available, including those promised to it."""
    return sum(map(table.pool.is_exclusive, table.blocks)) + max(table.promised - len(table.blocks), 0)


def age(table: BlockTable) -> int:
    """Return the place in the order of first use; an unused table (a new fork) is the youngest."""
    return table.arrival if table.arrival is not None else sys.maxsize


def _held(tables: list[BlockTable]) -> int:
    distinct = {block for table in tables for block in table.blocks}
    return len(distinct) + sum(max(table.promised - len(table.blocks), 0) for table in tables)


def _preemptible(tables: list[BlockTable]) -> list[BlockTable]:
    """Return all sequences but the oldest, the youngest last."""
    by_age = sorted((table for table in tables if table.blocks), key=age)[1:]
    return [table for table in by_age if len(table.seq) > table.gave_way_at]
