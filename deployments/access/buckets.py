"""A rate as a leaky bucket: what was used drains at the rate's pace, and as much as a minute's worth fits in."""

from __future__ import annotations

MINUTE_S = 60.0


class Bucket:
    """What was used of a rate that holds for a minute. The rate comes with every call: it may change in between."""

    def __init__(self) -> None:
        self._used = 0.0
        self._at = 0.0

    def used(self, limit: float, now: float) -> float:
        """What has not drained yet; more than `limit` where more was used than was expected."""
        self._used = max(self._used - (now - self._at) * limit / MINUTE_S, 0.0)
        self._at = now
        return self._used

    def wait_s(self, needed: float, limit: float, now: float) -> float:
        """Seconds until `needed` fits in, or all of it is empty, where it never would; 0.0: it does."""
        excess = self.used(limit, now) + min(needed, limit) - limit
        # Sums of many small numbers: what is too much by a rounding error fits.
        return max(excess, 0.0) * MINUTE_S / limit if excess > 1e-9 * limit else 0.0

    def add(self, amount: float, limit: float, now: float) -> None:
        """Use so much; a negative amount gives back."""
        self._used = max(self.used(limit, now) + amount, 0.0)
