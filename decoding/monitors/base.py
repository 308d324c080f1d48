"""The monitor slot: watch the answer that any method writes, and inject tokens into it.

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
    """Tokens injected into the answer, after which generation continues.

    Attributes:
        tokens: to append.
        reason: why, in one word: `stopped_by` of the segment of these tokens.
    """

    tokens: tuple[int, ...]
    reason: str


class Monitor(Part):
    """Monitor of one answer. It never delays generation: work that takes time runs in tasks of its own.

    Attributes:
        top: number of most probable tokens that it needs with each token.
    """

    top: int = 0

    @abstractmethod
    def begin(self, request: Request, models: ModelPool) -> None:
        """Begin: the answer is about to be written.

        Raises:
            TurnoutError: INVALID_ARGUMENT or NOT_FOUND: the models lack what it needs.
        """

    @abstractmethod
    def watch(self, segment: Segment) -> None:
        """Observe a segment of the answer, appended already; injected segments are not passed."""

    def intervene(self) -> Injection | None:
        """Return tokens to inject now, if any; called after every segment but the last."""
        return None

    def at_end(self) -> Injection | None:
        """Return tokens to continue with, if any; called when the answer ended with an end token."""
        return None

    def again(self, then: Callable[[tuple[int, ...]], bool], ended: bool) -> Injection | None:
        """Return the earlier injection; called instead of both if the answer is made again and continued from here.

        Args:
            then: whether these tokens follow in what was delivered.
            ended: whether the answer had ended with an end token.
        """
        return None

    async def close(self) -> None:
        """Close: the answer is done or cancelled; end tasks that still run, and account for them."""
