"""Speed of answers of different lengths over the baseline's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from experiments.grid.cells import Record

# Answers shorter than this are one class; above, each class is twice as wide as the one before.
SHORT = 8


@dataclass(slots=True)
class Speed:
    """Answers of about one length.

    Attributes:
        at_least: tokens; the next class begins at twice as many, or at `SHORT`.
        answers: how many.
        tokens: mean length.
        seconds_per_token: time of these answers over their tokens, within the batch they were in.
        relative: the baseline's seconds a token at this length over these; None: it has no such answer.
    """

    at_least: int
    answers: int
    tokens: float
    seconds_per_token: float
    relative: float | None


def by_length(records: Iterable[Record], base: Iterable[Record]) -> list[Speed]:
    """Speeds by length, shortest first.

    Args:
        records: of a way of answering.
        base: of the one it is compared with; itself: all relative speeds are 1.
    """
    mine, theirs = _classes(records), _classes(base)
    found = []
    for start, (count, tokens, seconds) in sorted(mine.items()):
        pace = seconds / tokens
        other = theirs.get(start)
        relative = other[2] / other[1] / pace if other and pace else None
        found.append(Speed(start, count, tokens / count, pace, relative))
    return found


def _classes(records: Iterable[Record]) -> dict[int, tuple[int, int, float]]:
    """(answers, tokens, seconds) by the least length of a class."""
    found: dict[int, tuple[int, int, float]] = defaultdict(lambda: (0, 0, 0.0))
    for record in records:
        if record.tokens:
            start = 1 if record.tokens < SHORT else 1 << (record.tokens.bit_length() - 1)
            count, tokens, seconds = found[start]
            found[start] = (count + 1, tokens + record.tokens, seconds + record.wall_s)
    return dict(found)
