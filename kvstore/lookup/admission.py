"""The doorkeeper: a chunk is stored when it is seen a second time, so one-off prompts never evict others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Lock
from typing import Literal

from kvstore.keys import Link

Admission = Literal["second", "always"]


@dataclass(slots=True)
class _Sighting:
    count: int
    last: float
    announced: bool  # a prompt held it, and that it was computed for that prompt is not another sighting


class Doorkeeper:
    """Record of the chunks seen lately, in two sets that take turns. Any thread may call.

    Args:
        admission: "always" lets everything in; "second" what was seen before, within the window.
        window_s: how long a sighting counts, seconds.
        capacity: digests remembered in each of the sets; a full one ends its turn early.
        clock: monotonic, seconds.
    """

    def __init__(
        self,
        admission: Admission,
        window_s: float,
        capacity: int = 1 << 16,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._admission = admission
        self._window = window_s
        self._capacity = capacity
        self._clock = clock
        self._lock = Lock()
        self._recent: dict[bytes, _Sighting] = {}
        self._older: dict[bytes, _Sighting] = {}
        self._turned = clock()

    def sight(self, links: Iterable[Link]) -> None:
        """Note the chunks of a prompt; whether they must be computed is not known yet."""
        with self._lock:
            for link in links:
                self._note(link.digest).announced = True

    def wants(self, link: Link) -> bool:
        """Tell whether to store a chunk that was just computed, or was computed before and is in a new prompt."""
        if self._admits_at_once(link):
            return True
        with self._lock:
            known = self._find(link.digest)
            if known is not None and known.announced:
                known.announced = False
            else:
                known = self._note(link.digest)
            return known.count > 1

    def expects(self, link: Link) -> bool:
        """Tell whether `wants` would be true if the chunk of an announced prompt were computed now."""
        return self._admits_at_once(link) or self.knows(link)

    def knows(self, link: Link) -> bool:
        """Tell whether a chunk was seen before, or is public: then it may well be stored."""
        if link.namespace.policy == "public":
            return True
        with self._lock:
            known = self._find(link.digest)
            return known is not None and known.count > 1

    def __len__(self) -> int:
        return len(self._recent) + len(self._older)

    def _admits_at_once(self, link: Link) -> bool:
        return self._admission == "always" or link.namespace.policy == "public"

    def _find(self, digest: bytes) -> _Sighting | None:
        known = self._recent.get(digest) or self._older.get(digest)
        return known if known is not None and self._clock() - known.last <= self._window else None

    def _note(self, digest: bytes) -> _Sighting:
        now = self._clock()
        known = self._find(digest) or _Sighting(0, now, False)
        known.count, known.last = known.count + 1, now
        if now - self._turned > self._window or len(self._recent) >= self._capacity:
            self._older, self._recent, self._turned = self._recent, {}, now
        self._older.pop(digest, None)
        self._recent[digest] = known
        return known
