"""The slot of identifier providers: static analysis that says which names may stand after a dot.

A module here assigns its class to `PART`; requests of `monitor_guided` choose it by file name.
"""

from __future__ import annotations

from abc import abstractmethod

from decoding.parts import Part

PACKAGE = "decoding.identifiers"


class IdentifierProvider(Part):
    """Provider of names for one answer. Its caller waits no longer than a deadline, and then cancels the call."""

    @abstractmethod
    async def names(self, code: str) -> list[str]:
        """Return the identifiers that may follow, whole; empty: that is not known here, and any may.

        Must not block the event loop: other requests are decoded meanwhile.

        Args:
            code: all of it so far; ends with a dot.
        """

    async def close(self) -> None:
        """Close: the answer is done or cancelled; free what was opened for it."""
