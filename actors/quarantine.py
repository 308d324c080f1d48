"""Quarantine of requests that may have killed a process: they are retried one at a time until cleared or failed."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from contextvars import ContextVar
from typing import Generic, TypeVar

from turnout.errors import Code, TurnoutError

K = TypeVar("K", bound=Hashable)

# The request whose work the current task does; for messages.
REQUEST: ContextVar[str] = ContextVar("request", default="")


class Quarantine(Generic[K]):
    """Bookkeeping of work that was in flight when a process died; its caller reports deaths and completions.

    Work that was in flight is quarantined: it runs alone, one item at a time, until it has completed once. If a process
    dies while one quarantined item runs alone, that item is poisoned if the process had completed other work before, or
    if the item was alone when another process died; otherwise the process, or something that killed it from outside,
    may be at fault. So poisoned work kills at most three processes; other work is only delayed.
    """

    def __init__(self) -> None:
        self._quarantine: dict[K, tuple[str, ...]] = {}  # and where processes ended while it was at work
        self._tried: set[K] = set()  # those that were alone when a process died
        self._sound = False  # whether the present process has completed work

    def __contains__(self, work: K) -> bool:
        return work in self._quarantine

    def __len__(self) -> int:
        return len(self._quarantine)

    def died(self, at_work: Collection[K], place: str) -> dict[K, tuple[str, ...]]:
        """A process ended.

        Args:
            at_work: what it was working on; what waited for it is not meant.
            place: which process it was.

        Returns:
            The poisoned item, which leaves the quarantine, and where the processes were; empty if none is identified.
        """
        sound, self._sound = self._sound, False
        if len(at_work) == 1:
            work = next(iter(at_work))
            if work in self._quarantine and (sound or work in self._tried):
                before = self._quarantine[work]
                self.done(work)
                return {work: (*before, place)}
            self._tried.add(work)
        for work in at_work:
            self._quarantine[work] = (*self._quarantine.get(work, ()), place)
        return {}

    def done(self, work: K) -> None:
        """Release work that has completed or was given up."""
        self._quarantine.pop(work, None)
        self._tried.discard(work)

    def completed(self) -> None:
        """The present process has completed some work."""
        self._sound = True

    def tried(self, work: K) -> bool:
        """Whether a process died while work was alone in it: then others go first, to show whether theirs is sound."""
        return work in self._tried

    def admits(self, work: K, at_work: Collection[K]) -> bool:
        """Whether work may begin now.

        Args:
            work: what wants to.
            at_work: what is under way in the same process.
        """
        return not self._quarantine or (work in self._quarantine and not at_work)


def poison_request_error(request: str, places: tuple[str, ...]) -> TurnoutError:
    """Return the error of a poisoned request: INTERNAL, so that no client retries it."""
    named = f"request {request!r}" if request else "a request"
    message = (
        f"{named} ended {len(places)} processes in a row ({', then '.join(places)}) and is not tried again;"
        " the others went on"
    )
    return TurnoutError(Code.INTERNAL, message)
