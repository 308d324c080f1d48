"""The drafter whose draft promises the most tokens per second, by what its length policy has measured."""

from __future__ import annotations

from collections.abc import Sequence as Items

from decoding.selectors.base import Selector
from decoding.sequence import Sequence


class Goodput(Selector):
    """Goodput decides between drafters as it decides on the length of one (paper #197, SmartSpec).

    Each arm's length policy says how many tokens per second it expects of a round in which its drafter has a draft; a
    drafter that finds none gives the turn to the next. Arms whose policies measure no times stand where a step of plain
    decoding would; of equal ones the first of the request is asked first.
    """

    papers = (197,)
    weighs = True

    def __init__(self, params: object = None) -> None:
        super().__init__(params)
        self._promises: list[float] = []

    def weigh(self, promises: Items[float]) -> None:
        """See `Selector.weigh`."""
        self._promises = list(promises)

    def order(self, seq: Sequence, num_arms: int) -> list[int]:
        """The arms by falling promise."""
        promises = self._promises or [1.0] * num_arms
        return sorted(range(num_arms), key=promises.__getitem__, reverse=True)


PART = Goodput
