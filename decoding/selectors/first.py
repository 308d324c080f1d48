"""The first drafter that has something to propose."""

from __future__ import annotations

from decoding.selectors.base import Selector
from decoding.sequence import Sequence


class First(Selector):
    """Drafters in the order of the request: a copy where one is found, else the next (paper #141, CopySpec)."""

    papers = (141,)
    learns = False

    def order(self, seq: Sequence, num_arms: int) -> list[int]:
        """Always the same."""
        return list(range(num_arms))


PART = First
