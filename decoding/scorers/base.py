"""The scorer slot: score a drafted step, and give the probability that a step of that score is kept.

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
    """Scorer of steps before they enter the answer.

    Attributes:
        threshold: name of its parameter for the least score of a kept step; 0.0 keeps every step.
        keeps_none: a value of it that no score reaches.
        greatest: the greatest score; the least is 0.
    """

    threshold: ClassVar[str]
    keeps_none: ClassVar[float]
    greatest: ClassVar[float] = 1.0

    @property
    def soft(self) -> str:
        """Name of the parameter that makes acceptance random or ignores the threshold; empty: the threshold decides."""
        return ""

    @abstractmethod
    async def score(self, models: ModelPool, seq: Sequence, step: tuple[int, ...]) -> float:
        """Score a step after the answer so far, from the whole prefix.

        Args:
            models: both roles.
            seq: the answer so far; nothing is appended.
            step: at least one token.
        """

    @abstractmethod
    def chance(self, score: float) -> float:
        """Return the probability w(score) that the step is kept, from 0 to 1; else the target writes the step."""
