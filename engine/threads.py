"""Thread count of CPU forwards: the fastest one, given the other work that needs the cores."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

TURN_S = 0.1  # of a trial's four, at least
TURN_FORWARDS = 8  # of a trial's four, at least; the first one of each is not counted
SHORTEST_HOLD_S, LONGEST_HOLD_S = 1.0, 60.0  # between trials, of time spent working
MARGIN = 1.03  # by how much the other number must be faster
IDLE_S = 0.02  # a gap that is longer was not the machine's doing
MANY = 8  # tokens of a sequence from which on a forward computes rather than reads weights


class Fed(NamedTuple):
    """Size of a forward: sequences, and tokens of all of them."""

    sequences: int
    tokens: int

    @property
    def kind(self) -> tuple[int, int]:
        """Equal for forwards that are limited by the same: their number of sequences, and tokens of each."""
        each = min(self.tokens // max(self.sequences, 1), MANY)
        return self.sequences.bit_length(), each.bit_length()


@dataclass(slots=True)
class _Turn:
    """What was done in one number's turns: predicted seconds of work, and seconds it took."""

    work_s: float = 0.0
    took_s: float = 0.0


@dataclass(slots=True)
class _Choice:
    """What is used for one model in one kind of forward, and the trial that runs."""

    threads: int
    hold_s: float = SHORTEST_HOLD_S
    held_s: float = 0.0
    turn: int | None = None  # of a trial: the present number, the other, the other, the present
    forwards: int = 0
    seconds: float = 0.0
    turns: tuple[_Turn, _Turn] = field(default_factory=lambda: (_Turn(), _Turn()))


def measured(device: str, most: int) -> Threads | None:
    """Return a chooser of up to `most` threads for a device's forwards; None if they do not run on CPU cores."""
    return Threads(most) if device == "cpu" else None


class Threads:
    """All threads, or one fewer where that was measured to be faster.

    The threads of a forward wait for each other several times a layer, so a front end, a client or another model that
    takes the core of one of them stops them all. Whether that costs more than doing without a core depends on the
    model, on what a forward is fed and on the machine: both are tried in turns, ever more rarely while one stays best.

    Args:
        most: threads that a forward may use.
        clock: seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._most = most
        self._clock = clock
        self._choices: dict[tuple[str, int, int], _Choice] = {}
        self._ended = 0.0

    def of(self, model: str, fed: Fed) -> int:
        """Threads of the model's next forward, which is fed so much."""
        choice = self._choice(model, fed)
        return self._other(choice) if choice.turn in (1, 2) else choice.threads

    def took(self, model: str, fed: Fed, work_s: float | None, seconds: float, forwards: int = 1) -> None:
        """Learn from a forward that has just ended, or from several in a row.

        Args:
            model: whose it was.
            fed: how much it was fed.
            work_s: how long the cost model says that it takes, in seconds; None: it does not know.
            seconds: how long it took.
            forwards: their number; the others are of all of them together, but for `fed`.
        """
        now = self._clock()
        gap_s = now - seconds - self._ended
        self._ended = now
        if self._most == 1 or work_s is None:
            return
        # What delays the next forward belongs to it; but not the time in which there was nothing to do.
        elapsed = seconds + (max(gap_s, 0.0) if gap_s < IDLE_S else 0.0)
        choice = self._choice(model, fed)
        if choice.turn is not None:
            self._tried(choice, work_s, elapsed, forwards)
            return
        choice.held_s += elapsed
        if choice.held_s >= choice.hold_s:
            choice.turn, choice.turns = 0, (_Turn(), _Turn())

    def _choice(self, model: str, fed: Fed) -> _Choice:
        return self._choices.setdefault((model, *fed.kind), _Choice(self._most))

    def _other(self, choice: _Choice) -> int:
        return self._most - 1 if choice.threads == self._most else self._most

    def _tried(self, choice: _Choice, work_s: float, elapsed: float, forwards: int) -> None:
        assert choice.turn is not None
        if choice.forwards:
            turn = choice.turns[choice.turn in (1, 2)]
            turn.work_s += work_s
            turn.took_s += elapsed
        choice.forwards += forwards
        choice.seconds += elapsed
        if choice.forwards <= TURN_FORWARDS or choice.seconds < TURN_S:
            return
        choice.turn, choice.forwards, choice.seconds = choice.turn + 1, 0, 0.0
        if choice.turn == 4:
            self._decide(choice)

    def _decide(self, choice: _Choice) -> None:
        present, other = choice.turns
        choice.turn, choice.held_s = None, 0.0
        if other.work_s * present.took_s > MARGIN * present.work_s * other.took_s:
            choice.threads, choice.hold_s = self._other(choice), SHORTEST_HOLD_S
        else:
            choice.hold_s = min(2 * choice.hold_s, LONGEST_HOLD_S)
