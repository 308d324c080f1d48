"""The monitor slot: watch what any method writes, and put words into the answer.

A module here assigns its class to `PART`; requests of `monitored` choose it by file name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from decoding.model import ModelPool, Request
from decoding.parts import Part
from turnout.types import Segment

PACKAGE = "decoding.monitors"


@dataclass(frozen=True, slots=True)
class Injection:
    """Words for the answer, after which writing goes on.

    Attributes:
        tokens: to append.
        reason: why, in one word: what the segment of these tokens was "stopped by".
    """

    tokens: tuple[int, ...]
    reason: str


class Monitor(Part):
    """Watches one answer. It never makes the writing wait: what takes time runs in tasks of its own.

    Attributes:
        top: how many of the most probable tokens it must be shown with each token.
    """

    top: int = 0

    @abstractmethod
    def begin(self, request: Request, models: ModelPool) -> None:
        """The answer is about to be written.

        Raises:
            TurnoutError: INVALID_ARGUMENT or NOT_FOUND: the models lack what it needs.
        """

    @abstractmethod
    def watch(self, segment: Segment) -> None:
        """More of the answer, appended already; what was injected is not shown."""

    def intervene(self) -> Injection | None:
        """Asked after every segment but the last: what to put into the answer now, if anything."""
        return None

    def at_end(self) -> Injection | None:
        """Asked where the answer ended with an end token: what to go on with, if anything."""
        return None

    def again(self, then: Callable[[tuple[int, ...]], bool], ended: bool) -> Injection | None:
        """Asked instead of both where the answer is made again and went on from here: what was put in then.

        Args:
            then: whether these words follow in what was delivered.
            ended: whether the answer had ended with an end token.
        """
        return None

    async def close(self) -> None:
        """The answer is done or given up: end what still runs, and account for it."""
