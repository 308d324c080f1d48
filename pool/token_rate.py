"""Rate at which a pool gives tokens."""

from __future__ import annotations

import time

from turnout.calls import Event


class Rate:
    """Tokens per second over the last full window."""

    WINDOW_S = 5.0

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._tokens = 0
        self._last = 0.0

    def count(self, event: Event) -> None:
        """Count the tokens of an event."""
        self._roll()
        self._tokens += len(getattr(event, "tokens", ()))

    def per_second(self) -> float:
        """Return the rate."""
        self._roll()
        return self._last

    def _roll(self) -> None:
        elapsed = time.monotonic() - self._since
        if elapsed >= self.WINDOW_S:
            self._last, self._tokens, self._since = self._tokens / elapsed, 0, time.monotonic()
