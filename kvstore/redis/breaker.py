"""The circuit breaker of one node: after some errors in a row no call waits for that node."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from kvstore.base import StoreFault

State = Literal["closed", "open", "half-open"]
# A cooldown lasts between once and one and a half times what is set, so that not all workers try at once.
JITTER = 0.5


def _in_background(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="kvstore-probe", daemon=True).start()


class Breaker:
    """Circuit breaker of a node: counts errors and decides on calls. Thread-safe.

    Closed: every call passes. After `errors` errors in a row it opens: none does, at the cost of a lock. When the
    cooldown is over, a probe runs in the background, so no request waits for a node that may still be dead; if it
    goes well, the breaker is half-open: one call may pass at a time, and its outcome closes or opens the breaker.

    Args:
        errors: in a row that open it.
        cooldown_s: seconds until the first probe, and between probes.
        probe: whether the node answers; None: there is no probe, and a cooldown ends half-open.
        clock: seconds.
        jitter: a number in [0, 1).
        in_background: runs the probe in another thread.
    """

    def __init__(
        self,
        errors: int = 3,
        cooldown_s: float = 1.0,
        *,
        probe: Callable[[], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        in_background: Callable[[Callable[[], None]], None] = _in_background,
    ) -> None:
        if errors < 1 or cooldown_s <= 0:
            raise ValueError("a breaker needs at least one error and a cooldown above 0 s")
        self._errors = errors
        self._cooldown_s = cooldown_s
        self._probe = probe
        self._clock = clock
        self._jitter = jitter
        self._in_background = in_background
        self._lock = threading.Lock()
        self._state: State = "closed"
        # Changes with the state: what was begun in another state says nothing about this one.
        self._era = 0
        self._in_a_row = 0
        self._retry_at = 0.0
        self._busy = False  # open: the probe runs; half-open: the one call is under way
        self.opened = 0

    @property
    def state(self) -> State:
        """What it is now."""
        return self._state

    def admit(self) -> int:
        """Ask to call the node; the answer goes back with `settle`.

        Raises:
            StoreFault: open.
        """
        with self._lock:
            if self._state == "closed":
                return self._era
            admitted, probe = self._after_trouble()
            era = self._era
        if probe:
            self._in_background(self._run_probe)
        if not admitted:
            raise StoreFault("open", "the breaker of this node is open")
        return era

    def settle(self, era: int, good: bool | None) -> None:
        """Say how a call went that `admit` let through; None: it ended without an outcome."""
        with self._lock:
            if era != self._era:
                return
            if self._state == "half-open":
                self._busy = False
            if good:
                self._in_a_row = 0
                if self._state == "half-open":
                    self._become("closed")
            elif good is False:
                self._in_a_row += 1
                if self._state == "half-open" or self._in_a_row >= self._errors:
                    self._open()

    def wake(self) -> None:
        """Start the probe if one is due, though no call is made."""
        with self._lock:
            due = self._probe is not None and self._state == "open" and self._after_trouble()[1]
        if due:
            self._in_background(self._run_probe)

    def _after_trouble(self) -> tuple[bool, bool]:
        """Return (the caller may pass, the probe must run) of a breaker that is not closed."""
        if self._state == "open":
            if self._busy or self._clock() < self._retry_at:
                return False, False
            if self._probe is not None:
                self._busy = True
                return False, True
            self._become("half-open")
        if self._busy:
            return False, False
        self._busy = True
        return True, False

    def _run_probe(self) -> None:
        good = False
        try:
            with suppress(StoreFault):
                good = self._probe is not None and self._probe()
        finally:  # whatever it ended with, another one must be able to run
            with self._lock:
                self._busy = False
                if good:
                    self._become("half-open")
                else:
                    self._retry_at = self._clock() + self._pause()

    def _open(self) -> None:
        self._retry_at = self._clock() + self._pause()
        self.opened += 1
        self._become("open")

    def _become(self, state: State) -> None:
        self._state = state
        self._era += 1
        self._in_a_row = 0
        self._busy = False

    def _pause(self) -> float:
        return self._cooldown_s * (1 + JITTER * self._jitter())
