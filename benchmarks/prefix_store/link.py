"""A byte store behind a link of limited speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvstore.base import ByteStore, StoreFault
from kvstore.fakes import PassOn
from kvstore.redis.reading import Done, Place


class SlowLink(PassOn):
    """A `ByteStore` whose values come no faster than a link lets them; one read at a time.

    Only what is read is slow: values are held back until the link would have delivered them.

    Args:
        inner: the store behind it.
        rate: bytes per second; None: as fast as they come.
        clock: monotonic, seconds.
        sleep: waits for a number of seconds.

    Attributes:
        arrivals: when each value that was read so far was there, by the clock.
    """

    def __init__(
        self,
        inner: ByteStore,
        rate: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self.arrivals: list[float] = []

    def read(self, keys: Sequence[bytes], place: Place, done: Done, ttl_ms: int, deadline: float) -> int:
        """As `ByteStore`; a value that the link does not deliver by the deadline is not read."""
        free_at, size, late = self._clock(), 0, False

        def placed(index: int, length: int) -> memoryview | None:
            nonlocal size
            size = length
            return place(index, length)

        def arrived(index: int) -> bool:
            nonlocal free_at, late
            if self._rate is not None:
                free_at += size / self._rate
                wait = min(free_at, deadline) - self._clock()
                if wait > 0:
                    self._sleep(wait)
                if free_at > deadline:
                    late = True
                    return False
            self.arrivals.append(self._clock())
            return done(index)

        count = self._inner.read(keys, placed, arrived, ttl_ms, deadline)
        if late and count == 1:
            raise StoreFault("late", "the link is too slow for the first value")
        return count - late
