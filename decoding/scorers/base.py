"""The scorer slot: how good is a drafted step, and how likely is a step of that score kept.

A module here assigns its class to `PART`; requests of `step_speculation` choose it by file name.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from decoding.model import ModelPool
from decoding.parts import Part
from decoding.sequence import Sequence

PACKAGE = "decoding.scorers"


class Scorer(Part):
    """Judges steps before they enter the answer.

    Attributes:
        threshold: which of its parameters says from which score on a step stays; 0.0 keeps every step.
        keeps_none: a value of it that no score reaches.
    """

    threshold: ClassVar[str]
    keeps_none: ClassVar[float]

    @property
    def soft(self) -> str:
        """Which of its parameters has the threshold decide by chance, or not at all; empty: the threshold decides."""
        return ""

    @abstractmethod
    async def score(self, models: ModelPool, seq: Sequence, step: tuple[int, ...]) -> float:
        """The score of a step after all that was written, from the whole prefix.

        Args:
            models: both roles.
            seq: the answer so far; nothing is appended.
            step: at least one token.
        """

    @abstractmethod
    def chance(self, score: float) -> float:
        """Probability w(score) that the step is kept, from 0 to 1; a step that is not kept is written by the target."""
