"""The selector slot: which of a request's arms (a drafter with its length policy) drafts in a round.

A module here assigns its class to `PART`; requests choose it by file name.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from decoding.drafter_state import Stores
from decoding.parts import Part
from decoding.sequence import Sequence

PACKAGE = "decoding.selectors"


@dataclass(frozen=True, slots=True)
class Gain:
    """What a round brought: tokens emitted, at most `most` of them possible, in so many seconds.

    What the target read of prompts meanwhile is not counted among these.
    """

    tokens: int
    most: int
    seconds: float


class Selector(Part):
    """Chooses among arms 0 .. n - 1 by what they brought so far; it never sees a draft before it chooses."""

    def begin(self, seq: Sequence, arms: list[str], stores: Stores) -> None:
        """Before the first round of an answer, and of each later stretch of it where another model writes in between.

        Args:
            seq: the answer's sequence.
            arms: what each arm is; equal names do the same.
            stores: the target's, for what outlives the answer.
        """

    @abstractmethod
    def order(self, seq: Sequence, num_arms: int) -> list[int]:
        """Arms in the order in which they are asked; the first that proposes anything drafts the round."""

    def observe(self, arm: int, gain: Gain) -> None:
        """What the arm that drafted brought (also the first one asked, when none proposed anything)."""
