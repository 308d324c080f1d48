"""The selector slot: choose which of a request's arms (a drafter with its length policy) drafts in a round.

A module here assigns its class to `PART`; requests choose it by file name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import ClassVar

from decoding.drafter_state import Stores
from decoding.parts import Part
from decoding.sequence import Sequence

PACKAGE = "decoding.selectors"


@dataclass(frozen=True, slots=True)
class Gain:
    """Gain of a round: tokens emitted, of at most `most` possible, and the seconds it took.

    The time in which the target read prompts meanwhile is not counted.
    """

    tokens: int
    most: int
    seconds: float


class Selector(Part):
    """Selector among arms 0 .. n - 1, by their gains so far; it never sees a draft before it chooses.

    Attributes:
        learns: whether the choice depends on the outcomes of earlier rounds, or on times.
        weighs: whether `weigh` is to be called before `order`.
    """

    learns: ClassVar[bool] = True
    weighs: ClassVar[bool] = False

    def begin(self, seq: Sequence, arms: list[str], stores: Stores) -> None:
        """Begin an answer, and each later stretch of it after another model has written in between.

        Args:
            seq: the answer's sequence.
            arms: names of the arms; arms of equal names do the same.
            stores: the target's, for state that outlives the answer.
        """

    def weigh(self, promises: Items[float]) -> None:
        """Take note of what the coming round promises.

        Args:
            promises: [arms] tokens per second with a draft of the arm, over those of plain decoding; see
                `LengthPolicy.promise`.
        """

    @abstractmethod
    def order(self, seq: Sequence, num_arms: int) -> list[int]:
        """Return the arms in the order in which they are asked; the first that proposes anything drafts the round."""

    def observe(self, arm: int, gain: Gain) -> None:
        """Observe the gain of the arm that drafted (of the first one asked, if none proposed anything)."""
