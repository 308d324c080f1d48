"""Who gets blocks of a model's pool in a step: admission of new sequences, reservation, and who gives way."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from collections.abc import Sequence as Works

from decoding.sequence import Sequence
from engine.cache.blocks import OutOfBlocksError
from engine.cache.table import BlockTable
from engine.work import Work
from turnout.types import BlockHash

# Room beyond its own tokens that a sequence must find before it starts, in blocks.
ROOM_BLOCKS = 2


class StepMemory:
    """Hands out blocks during one step.

    A sequence starts only when the blocks of all its tokens, and some room, can be had without taking them from
    anybody who has started; the blocks are then promised to it. So memory that is short makes requests wait in their
    order of precedence; it preempts only those that outgrow what was promised.

    Args:
        tables: all the model's caches.
        candidates: operations that could run in this step.
    """

    def __init__(self, tables: Mapping[Sequence, BlockTable], candidates: Works[Work]) -> None:
        self._tables = tables
        self._candidates = candidates
        self._is_full = False
        self._promised: int | None = None  # blocks promised but not yet taken; None: not counted yet
        self._computing: dict[BlockHash, list[BlockTable]] | None = None
        self._settled: set[BlockTable] = set()  # caches that keep what they have in this step
        self._preempted: set[BlockTable] = set()

    def admit(self, work: Work, alone: bool) -> bool:
        """Let a sequence start, sharing what is published of its prefix; False: it waits.

        Args:
            work: its operation; what it lacks is brought up to date.
            alone: nothing that has started could run instead, so it starts whatever memory there is.
        """
        if self._is_full and not alone:
            return False
        table, pool = work.table, work.table.pool
        found = table.match_prefix()
        if not alone and self._is_computed_elsewhere(table, len(found)):
            return False
        blocks = min(-(-work.total // pool.block_size) + ROOM_BLOCKS, pool.num_blocks)
        if not alone:
            unheld = sum(pool.is_cached(block) for block in found)
            lacking = blocks - len(found) + unheld + self._outstanding(work.patient) - pool.num_available
            if lacking > 0 and lacking > self._takeable(work):
                self._is_full = True
                return False
        table.promised = blocks
        work.refresh()
        if self._promised is not None:
            self._promised += max(blocks - len(table.blocks), 0)
        if self._computing is not None:
            self._note(table)
        return True

    def _takeable(self, work: Work) -> int:
        """Blocks that only sequences in no hurry hold, for one that is."""
        if work.patient:
            return 0
        tables = [table for table in self._tables.values() if table.seq.patient]
        return sum(table.pool.is_exclusive(block) for table in tables for block in table.blocks)

    def _outstanding(self, patient: bool) -> int:
        """Blocks promised and not taken; who is in a hurry need not mind what others were promised."""
        if self._promised is None:
            tables = [table for table in self._tables.values() if patient or not table.seq.patient]
            self._promised = sum(max(table.promised - len(table.blocks), 0) for table in tables)
        return self._promised

    def _is_computed_elsewhere(self, table: BlockTable, num_found: int) -> bool:
        """Whether another sequence is about to publish at least half of what this one lacks."""
        full = (len(table.seq) - 1) // table.pool.block_size
        if num_found >= full:
            return False
        if self._computing is None:
            self._computing = {}
            for work in self._candidates:
                if work.started and not work.background and work.remaining > work.atomic:
                    self._note(work.table)
        mine = table.content.first(1)
        for other in self._computing.get(mine[0], ()):
            shared = table.shared_blocks(other)
            size = table.pool.block_size
            if 2 * (shared - num_found) * size >= len(table.seq) - num_found * size:
                return True
        return False

    def _note(self, table: BlockTable) -> None:
        """Remember a sequence whose prompt is being computed, by its first block."""
        assert self._computing is not None
        first = table.content.first(1)
        if first:
            self._computing.setdefault(first[0], []).append(table)

    def reserve(self, work: Work, tokens: int) -> bool:
        """Reserve blocks for the next `tokens`, preempting idle caches, then younger sequences; False: it waits."""
        if work.table in self._preempted:
            return False
        length = len(work.table) + work.cached_nodes + tokens
        while True:
            try:
                work.table.reserve(length)
            except OutOfBlocksError:
                victim = None if work.background else self._victim(work)
                if victim is None:
                    return False
                victim.drop()
                self._preempted.add(victim)
            else:
                self._settled.add(work.table)
                return True

    def _victim(self, work: Work) -> BlockTable | None:
        """A cache to give up for `work`: idle ones first, then those of younger sequences; the youngest of them."""
        waiting = {w.table for w in self._candidates if not w.background}
        held = [t for t in self._tables.values() if t.blocks and t not in self._settled and t is not work.table]
        if work.patient:
            held = [t for t in held if t.seq.patient]
        elif patient := [t for t in held if t.seq.patient]:
            return max(patient, key=age)
        idle = [t for t in held if t not in waiting]
        younger = [t for t in held if age(t) > age(work.table)]
        return max(idle or younger, key=age, default=None)

    def squeeze(self, work: Work, token_budget: int) -> int:
        """Nothing fitted: give one sequence everything the others hold.

        Returns:
            Tokens it may feed now; their blocks are reserved. 0 where that would take from somebody in more of a hurry.
        """
        others = [table for table in self._tables.values() if table.blocks and table is not work.table]
        if work.patient and not all(table.seq.patient for table in others):
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


def age(table: BlockTable) -> int:
    """Order of first use; a table nobody has used yet (a fresh fork) is the youngest."""
    return table.arrival if table.arrival is not None else sys.maxsize
