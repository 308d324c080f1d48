"""Who may have ended a process: what was at work when it died runs alone until it is cleared, or found guilty."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from contextvars import ContextVar
from typing import Generic, TypeVar

from turnout.errors import Code, TurnoutError

K = TypeVar("K", bound=Hashable)

# The request whose work the current task does; for messages.
REQUEST: ContextVar[str] = ContextVar("request", default="")


class Quarantine(Generic[K]):
    """Work that was under way when a process died. Knows nothing of processes: it is told, and asked.

    Whatever was at work is suspect, and runs alone: one after the other, and nothing beside it, until it has completed
    once. A process that dies while one suspect runs alone proves it guilty if that process had completed other work
    before, or if the suspect was alone when another process died; otherwise the process may be at fault, or who ends
    it from outside. So work that ends its process does so at most three times; the others are late.
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
            The guilty, which is no longer suspect, and where the processes were; empty where nobody is found out.
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
        """It has completed, or nobody wants it any more."""
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


def blamed(request: str, places: tuple[str, ...]) -> TurnoutError:
    """What the guilty is told: INTERNAL, so that nobody tries it once more."""
    named = f"request {request!r}" if request else "a request"
    message = (
        f"{named} ended {len(places)} processes in a row ({', then '.join(places)}) and is not tried again;"
        " the others went on"
    )
    return TurnoutError(Code.INTERNAL, message)
