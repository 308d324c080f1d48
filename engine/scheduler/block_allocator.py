"""Block allocation of a step: admission of new sequences, reservation of their blocks, preemption."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Works

from decoding.sequence import Sequence
from engine.cache.blocks import OutOfBlocksError
from engine.cache.table import BlockTable
from engine.scheduler.fairness import BlockShares, age, freed
from engine.scheduler.queued_operation import QueuedOperation
from turnout.types import BlockHash

# Free blocks, beyond those of its own tokens, that a sequence needs to start.
ROOM_BLOCKS = 2


class BlockAllocator:
    """Allocator of a model's KV blocks for one step.

    A sequence starts only when the blocks of all its tokens, and some more, are available without taking them from
    sequences that have started; the blocks are then promised to it. So if memory is short, requests wait in order of
    precedence; preempted are only sequences that outgrow their promise, and those of tenants above their shares, for
    a tenant within its share: see `engine.scheduler.fairness.BlockShares`.

    Args:
        tables: caches of all sequences of the model.
        candidates: operations that could run in this step.
    """

    def __init__(self, tables: Mapping[Sequence, BlockTable], candidates: Works[QueuedOperation]) -> None:
        self._tables = tables
        self._candidates = candidates
        self._is_full = False
        self._full: set[str] = set()  # tenants above their shares whose next sequence did not fit
        self._shares: dict[bool, BlockShares] = {}
        self._promised: dict[bool, int] = {}  # see `_outstanding`, as far as it was counted
        self._prompts = _Prompts(candidates)
        self._settled: set[BlockTable] = set()  # caches that are not preempted in this step
        self._preempted: set[BlockTable] = set()

    def admit(self, work: QueuedOperation, alone: bool) -> bool:
        """Admit a sequence, which shares the published blocks of its prefix; False: it waits.

        Args:
            work: its operation; what it lacks is brought up to date.
            alone: no started sequence could run instead, so it starts in any case.
        """
        table = work.table
        if not alone:
            if self._is_full or work.tenant in self._full:
                return False
            found = table.match_prefix()
            if self._prompts.has_most_of(table, len(found)):
                return False
            if not self._make_room(work, found):
                return False
        before = _untaken(table)
        table.promised = _needed(work)
        work.refresh()
        for low_priority in self._promised:
            if low_priority or not work.low_priority:
                self._promised[low_priority] += _untaken(table) - before
        self._shares.clear()
        self._prompts.add(table)
        return True

    def blocked(self, prompts: Collection[QueuedOperation]) -> set[str]:
        """Return the tenants that cannot start a sequence now.

        If memory is short, tenants within their shares go first, the longest waiting first, and blocks they wait for
        are not given to others.

        Args:
            prompts: for each tenant with new sequences, the one that starts first.
        """
        found = {work: work.table.match_prefix() for work in prompts}
        late = {work.tenant for work in prompts if self._prompts.has_most_of(work.table, len(found[work]))}
        if all(self._lacking(work, found[work]) <= 0 for work in prompts):
            return late
        blocked: set[str] = set()
        is_full = False
        for work in sorted(prompts, key=lambda work: (not self._is_entitled(work, found[work]), age(work.table))):
            if is_full or not self._has_room(work, found[work]):
                blocked.add(work.tenant)
            is_full = is_full or self._lacking(work, found[work]) > 0
        return blocked | late

    def _lacking(self, work: QueuedOperation, found: list[int]) -> int:
        """Return the blocks that a sequence needs beyond those available; 0 or less: none.

        Args:
            work: its operation.
            found: published blocks that it would share.
        """
        table, pool = work.table, work.table.pool
        unheld = sum(pool.is_cached(block) for block in found)
        others = self._outstanding(work.low_priority) - _untaken(table)
        return _needed(work) - len(found) + unheld + others - pool.num_available

    def _has_room(self, work: QueuedOperation, found: list[int]) -> bool:
        """Return whether a sequence can get its blocks, by preemption if necessary."""
        lacking = self._lacking(work, found)
        return lacking <= 0 or lacking <= self._takeable(work) or self._victims_of(work, found) is not None

    def _make_room(self, work: QueuedOperation, found: list[int]) -> bool:
        """Preempt other sequences if that is how a sequence gets its blocks; False: it waits."""
        lacking = self._lacking(work, found)
        if lacking <= 0 or lacking <= self._takeable(work):
            return True
        victims = self._victims_of(work, found)
        if victims is None:
            if len(self._shares_of(work)) < 2 or self._is_entitled(work, found):
                self._is_full = True
            else:
                self._full.add(work.tenant)
            return False
        for victim in victims:
            self._preempt(victim)
        return True

    def _victims_of(self, work: QueuedOperation, found: list[int]) -> list[BlockTable] | None:
        """Return sequences of tenants above their shares to preempt for one within its share; None: too few."""
        shares = self._shares_of(work)
        if len(shares) < 2 or not self._is_entitled(work, found):
            return None
        lacking = self._lacking(work, found) - self._takeable(work)
        victims: list[BlockTable] = []
        for table in shares.preemptible(work.tenant):
            victims.append(table)
            lacking -= freed(table)
            if lacking <= 0:
                return victims
        return None

    def _is_entitled(self, work: QueuedOperation, found: list[int]) -> bool:
        return self._shares_of(work).is_entitled(work.table, found, _needed(work))

    def _shares_of(self, work: QueuedOperation) -> BlockShares:
        """Return the shares within a priority class; low-priority sequences share what interactive ones leave."""
        shares = self._shares.get(work.low_priority)
        if shares is None:
            held = [t for t in self._tables.values() if t.blocks or t.promised]
            mine = [t for t in held if t.seq.low_priority is work.low_priority]
            waiting = {w.tenant for w in self._candidates if w.low_priority is work.low_priority and not w.background}
            size = work.table.pool.num_blocks
            if work.low_priority:
                size -= len({block for t in held if not t.seq.low_priority for block in t.blocks})
            shares = self._shares[work.low_priority] = BlockShares(mine, waiting, size)
        return shares

    def _preempt(self, victim: BlockTable) -> None:
        """Preempt a sequence of another tenant."""
        victim.gave_way_at = len(victim.seq)
        victim.drop()
        self._preempted.add(victim)
        self._forget_counts()

    def _forget_counts(self) -> None:
        self._promised.clear()
        self._shares.clear()

    def _takeable(self, work: QueuedOperation) -> int:
        """Return the blocks that only low-priority sequences hold, for an interactive one."""
        if work.low_priority:
            return 0
        tables = [table for table in self._tables.values() if table.seq.low_priority]
        return sum(table.pool.is_exclusive(block) for table in tables for block in table.blocks)

    def _outstanding(self, low_priority: bool) -> int:
        """Return blocks promised and not taken; interactive sequences ignore promises to low-priority ones."""
        if low_priority not in self._promised:
            tables = [table for table in self._tables.values() if low_priority or not table.seq.low_priority]
            self._promised[low_priority] = sum(map(_untaken, tables))
        return self._promised[low_priority]

    def by_entitlement(self, shares: Works[tuple[QueuedOperation, int]]) -> list[tuple[QueuedOperation, int]]:
        """Return the order in which blocks are reserved for a step: tenants above their shares come last.

        Args:
            shares: operations, and the tokens each feeds, in order of precedence: kept if memory suffices for all.
        """
        if not shares:
            return []
        pool = shares[0][0].table.pool
        slots = sum([tokens + work.cached_rows for work, tokens in shares])
        # Of each cache, at most the block that is begun and a copy of it are needed besides what the tokens fill.
        if 2 * len(shares) + slots // pool.block_size <= pool.num_available:
            return list(shares)
        if sum(work.table.blocks_needed(_length(work, tokens)) for work, tokens in shares) <= pool.num_available:
            return list(shares)
        return sorted(shares, key=lambda share: self._is_above(share[0]))

    def _is_above(self, work: QueuedOperation) -> bool:
        shares = self._shares_of(work)
        return len(shares) > 1 and shares.is_above(work.tenant)

    def reserve(self, work: QueuedOperation, tokens: int) -> bool:
        """Reserve blocks for the next `tokens`, by preemption if necessary, see `_victim`; False: it waits."""
        if work.table in self._preempted:
            return False
        length = _length(work, tokens)
        while True:
            try:
                work.table.reserve(length)
            except OutOfBlocksError:
                victim = None if work.background else self._victim(work)
                if victim is None:
                    return False
                if victim.seq.tenant != work.tenant:
                    victim.gave_way_at = len(victim.seq)
                victim.drop()
                self._preempted.add(victim)
                self._forget_counts()
            else:
                self._settled.add(work.table)
                return True

    def _victim(self, work: QueuedOperation) -> BlockTable | None:
        """Return the cache to preempt for `work`: the youngest idle one, otherwise that of the youngest sequence.

        With several tenants, one within its share takes from those above theirs first; those above theirs take
        only idle caches from those within.
        """
        waiting = {w.table for w in self._candidates if not w.background}
        held = [t for t in self._tables.values() if t.blocks and t not in self._settled and t is not work.table]
        if work.low_priority:
            held = [t for t in held if t.seq.low_priority]
        elif low := [t for t in held if t.seq.low_priority]:
            return max(low, key=age)
        idle = [t for t in held if t not in waiting]
        younger = [t for t in held if age(t) > age(work.table)]
        shares = self._shares_of(work)
        if len(shares) < 2:
            return max(idle or younger, key=age, default=None)
        if not shares.is_above(work.tenant):
            from_above = (t for t in shares.preemptible(work.tenant) if t in held)
            return next(from_above, None) or max(idle or younger, key=age, default=None)
        above = [t for t in held if shares.is_above(t.seq.tenant)]
        mine = [t for t in above if t in idle] or [t for t in above if t in younger]
        return max(mine or idle, key=age, default=None)

    def squeeze(self, work: QueuedOperation, token_budget: int) -> int:
        """Give one sequence all blocks of the others, where nothing fitted.

        Returns:
            Tokens it may feed now; their blocks are reserved. 0 if that would preempt interactive sequences for a
            low-priority one.
        """
        others = [table for table in self._tables.values() if table.blocks and table is not work.table]
        if work.low_priority and not all(table.seq.low_priority for table in others):
            return 0
        for table in self._tables.values():
            if table is not work.table:
                table.drop()
        self._preempted.clear()
        work.refresh()
        tokens = min(work.remaining, max(token_budget, work.atomic))
        if work.remaining - tokens < work.atomic and tokens < work.remaining:
            tokens = work.remaining - work.atomic
        return tokens if self.reserve(work, tokens) else 0


class _Prompts:
    """Sequences whose prompts are being computed, by their first blocks; indexed at the first look-up.

    Args:
        candidates: operations that could run in the step.
    """

    def __init__(self, candidates: Works[QueuedOperation]) -> None:
        self._candidates = candidates
        self._by_start: dict[BlockHash, list[BlockTable]] | None = None

    def add(self, table: BlockTable) -> None:
        """Add a sequence that starts."""
        first = table.content.first(1)
        if first and self._by_start is not None:
            self._by_start.setdefault(first[0], []).append(table)

    def has_most_of(self, table: BlockTable, num_found: int) -> bool:
        """Return whether one of them is about to publish at least half of the blocks that a sequence lacks.

        Args:
            table: cache of the sequence.
            num_found: published blocks of it.
        """
        size = table.pool.block_size
        if num_found >= (len(table.seq) - 1) // size:
            return False
        if self._by_start is None:
            self._by_start = {}
            for work in self._candidates:
                if work.started and not work.background and work.remaining > work.atomic:
                    self.add(work.table)
        lacking = len(table.seq) - num_found * size
        computing = self._by_start.get(table.content.first(1)[0], ())
        return any(2 * (_shared_blocks(table, other) - num_found) * size >= lacking for other in computing)


def _shared_blocks(table: BlockTable, other: BlockTable) -> int:
    """Return the full blocks at the start of both sequences that have the same content and may be shared."""
    most = min(len(table.seq) - 1, len(other.seq)) // table.pool.block_size
    mine, theirs = table.content.first(most), other.content.first(most)
    return next((place for place in range(most) if mine[place] != theirs[place]), most)


def _untaken(table: BlockTable) -> int:
    """Return the blocks that were promised to a sequence and that it has not taken."""
    return max(table.promised - len(table.blocks), 0)


def _needed(work: QueuedOperation) -> int:
    """Return the blocks that a sequence needs to start."""
    pool = work.table.pool
    return min(-(-work.total // pool.block_size) + ROOM_BLOCKS, pool.num_blocks)


def _length(work: QueuedOperation, tokens: int) -> int:
    """Return the used slots of its cache after `tokens` more are fed."""
    return len(work.table) + work.cached_rows + tokens
