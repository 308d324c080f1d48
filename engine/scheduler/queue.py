"""The operations that wait for a model, in the order in which they came."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count

from decoding.model import Row
from decoding.sequence import Sequence
from engine.cache.table import BlockTable
from engine.scheduler.queued_operation import Work


class WaitingWork:
    """Operations that wait for a forward or take part in one; whatever ends one takes it out."""

    def __init__(self) -> None:
        self._works: dict[Work, None] = {}
        self._patient: set[Work] = set()  # those of them that are in no hurry
        self._blocked: set[Work] = set()  # those that wait for memory, and for no time
        self._sequences = Counter[Sequence]()  # whose they are
        self._order = count()

    def __len__(self) -> int:
        return len(self._works)

    def __iter__(self) -> Iterator[Work]:
        return iter(self._works)

    def __contains__(self, work: Work) -> bool:
        return work in self._works

    def add(self, work: Work) -> None:
        """A new operation; its sequence's place in the order of first use is set with its first one."""
        self.renew(work)
        if work.table.arrival is None:
            work.table.arrival = work.order
        self._works[work] = None
        self._sequences[work.table.seq] += 1
        if work.patient:
            self._patient.add(work)

    def renew(self, work: Work) -> None:
        """The operation has got one token and wants the next: it goes behind all others."""
        work.order = next(self._order)
        work.estimate()

    def discard(self, work: Work) -> None:
        """Nobody waits for it any more."""
        if work not in self._works:
            return
        del self._works[work]
        self._sequences[work.table.seq] -= 1
        if not self._sequences[work.table.seq]:
            del self._sequences[work.table.seq]
        self._patient.discard(work)
        self._blocked.discard(work)

    def finish(self, work: Work, rows: list[Row]) -> None:
        """Hand out its rows."""
        self.discard(work)
        if not work.future.done():
            work.future.set_result(rows)

    def refuse(self, work: Work, error: Exception) -> None:
        """Let it fail."""
        self.discard(work)
        if not work.future.done():
            work.future.set_exception(error)

    def cancel_all(self) -> None:
        """Cancel whoever waits."""
        for work in self._works:
            work.future.cancel()
        self._works.clear()
        self._sequences.clear()
        self._patient.clear()
        self._blocked.clear()

    def block(self, works: Iterable[Work]) -> None:
        """These wait for memory, and no others; until that is known again, no time is kept for them."""
        self._blocked = set(works)

    def unblocked(self, patient: bool) -> list[Work]:
        """Those that are in no hurry, or those that are, and wait for no memory."""
        return [work for work in self.of(patient) if work not in self._blocked]

    def of(self, patient: bool) -> list[Work]:
        """Those that are in no hurry, or those that are."""
        return [work for work in self._works if work.patient is patient]

    def has(self, patient: bool) -> bool:
        """Whether somebody waits for such an operation."""
        works = self._patient if patient else self._works
        return any(work.patient is patient and not work.background for work in works)

    def has_any(self, seq: Sequence) -> bool:
        """Whether an operation on a sequence is among them."""
        return seq in self._sequences

    def tenants(self, patient: bool) -> set[str]:
        """Whose operations wait for time: background ones, and those that wait for memory, are left out."""
        works = self._patient if patient else self._works
        counted = (work for work in works if work.patient is patient and not work.background)
        return {work.tenant for work in counted if work not in self._blocked}

    def candidates(self, patient: bool) -> list[Work]:
        """What could run now, brought up to date; one operation per cache.

        Args:
            patient: those that are in no hurry, and what others read ahead; or those only that are in a hurry.
        """
        found: list[Work] = []
        busy: set[BlockTable] = set()
        # What somebody waits for goes before background work on the same cache.
        for background in (False, True):
            for work in [work for work in self._works if work.background is background]:
                if work.patient is not patient and (work.patient or not background):
                    continue
                if work.table in busy or work.future.done():
                    continue
                if work.started or background:
                    work.refresh()
                else:
                    work.estimate()
                if work.remaining == 0:
                    self.finish(work, work.rows)
                else:
                    busy.add(work.table)
                    found.append(work)
        return found
