"""A circuit breaker: a server that fails again and again is left alone for a while."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from turnout.errors import Code, TurnoutError

State = Literal["closed", "half_open", "open"]


class Attempt:
    """One try of a server: says how it goes. What says nothing, as one that was cancelled, does not count.

    Args:
        count: called with whether the server answered.
    """

    def __init__(self, count: Callable[[bool], None]) -> None:
        self._count = count

    def succeeded(self) -> None:
        """The server answers."""
        self._count(True)

    def failed(self) -> None:
        """It does not, or not to the end, or not as servers should."""
        self._count(False)


class Breaker:
    """Breaker of one server. Closed, it lets all through; open, none; half open, one at a time that tries it.

    Args:
        name: the server's, for messages.
        failures: in a row, after which it opens.
        open_s: seconds it stays open before it is tried.
        clock: seconds.

    Attributes:
        opened: how often it has opened.
    """

    def __init__(self, name: str, failures: int, open_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._most = failures
        self._open_s = open_s
        self._clock = clock
        self._failures = 0
        self._since: float | None = None  # when it opened
        self._trying = False
        self.opened = 0

    @property
    def state(self) -> State:
        """Closed, half open or open."""
        if self._since is None:
            return "closed"
        return "open" if self._left_s > 0 else "half_open"

    @property
    def _left_s(self) -> float:
        """Seconds until it may be tried."""
        return 0.0 if self._since is None else self._since + self._open_s - self._clock()

    def check(self) -> None:
        """Refuse what could not be let through now.

        Raises:
            TurnoutError: UNAVAILABLE, with when to try again.
        """
        if self._since is not None and (self._left_s > 0 or self._trying):
            wait_s = max(self._left_s, 1.0)
            message = f"endpoint {self._name!r} has failed {self._failures} times in a row and is left alone"
            raise TurnoutError(Code.UNAVAILABLE, f"{message}; try again in {wait_s:.0f} s", retry_after_s=wait_s)

    @contextmanager
    def attempt(self) -> Iterator[Attempt]:
        """A try, for as long as the context lasts.

        Raises:
            TurnoutError: see `check`.
        """
        self.check()
        probes = self._since is not None
        self._trying = self._trying or probes
        try:
            yield Attempt(self._count)
        finally:
            if probes:
                self._trying = False

    def _count(self, answered: bool) -> None:
        if answered:
            self._failures, self._since, self._trying = 0, None, False
            return
        self._failures += 1
        if self._failures >= self._most:
            self.opened += self._since is None
            self._since = self._clock()
