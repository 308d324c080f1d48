"""A call that is made again when the replica that worked on it is lost: delivered output, retries, quarantine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from deployments.backend import Batch
from turnout.calls import Chunk, Decided, Delivered, Event, GenerateCall, Regained, Usage
from turnout.errors import Code, TurnoutError
from turnout.moved_calls import Moved

log = logging.getLogger("ray.serve")

LONGEST_PAUSE_S = 1.0
FIRST_PAUSE_S = 0.05
# Losses in a row without a new token, and of attempts in all that brought few, after which a call is not tried again.
MAX_STUCK = 2
MAX_LOSSES = 5
FEW = 32  # tokens


class LostError(Exception):
    """An attempt ended before its answer did, and not by a refusal.

    Args:
        place: which replica worked on it.
        moved: what it handed over.
        blameless: the replica was stopping, or only a process of its models ended: no call is to blame.
    """

    def __init__(self, place: str, moved: Moved | None = None, blameless: bool = False) -> None:
        super().__init__(place)
        self.place = place
        self.moved = moved
        self.blameless = blameless


@dataclass(slots=True)
class _Answer:
    """What the client has of one answer."""

    tokens: list[int]
    chars: int = 0
    reasoning_chars: int = 0
    finished: bool = False

    def delivered(self) -> Delivered:
        return Delivered(tuple(self.tokens), self.chars, self.finished, self.reasoning_chars)


class Attempts:
    """How often work was begun, and how it ended.

    A process that ends takes along everything it worked on, so no call is blamed at first. Work whose processes end
    twice in a row, without anything new in between, is blamed, if the second time it ran apart from other quarantined
    work. It does so from its first loss on until it makes progress, and from its second one on until something new
    comes: a call that only repeats what was delivered may end the process at the same place as before.

    Args:
        request_id: for messages.
        pool: for messages.

    Attributes:
        num_lost: attempts that were.
        gets_on: whether this attempt need not run apart any longer.
    """

    def __init__(self, request_id: str, pool: str) -> None:
        self._named = f"request {request_id!r}"
        self._pool = pool
        self._places: list[str] = []
        self._stuck = 0
        self._num_few = 0
        self._new = 0
        self._pause_s = 0.0
        self.num_lost = 0
        self.gets_on = False

    @property
    def quarantined(self) -> bool:
        """Whether the last process that worked on it ended, and nothing came since."""
        return self._stuck > 0

    @property
    def pause_s(self) -> float:
        """Time to wait before the next attempt: longer from one to the next while nothing comes, in seconds."""
        return self._pause_s

    def went_on(self, num_tokens: int = 0) -> None:
        """Something new was delivered."""
        self._new += num_tokens
        self._stuck = 0
        self._pause_s = 0.0
        self.gets_on = True

    def regained(self) -> None:
        """Something was made again that had been delivered."""
        self._pause_s = 0.0
        self.gets_on = self._stuck < MAX_STUCK

    def lost(self, loss: LostError, apart: bool = True) -> None:
        """An attempt was lost.

        Args:
            loss: how.
            apart: no other quarantined call ran at the same time.

        Raises:
            TurnoutError: INTERNAL: the work is to blame for it.
        """
        self.num_lost += 1
        self.gets_on = False
        new, self._new = self._new, 0
        self._pause_s = 0.0 if loss.moved else min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        if loss.blameless:
            return
        self._stuck += 1
        self._num_few += new < FEW
        self._places.append(loss.place)
        if (self._stuck >= MAX_STUCK and apart) or self._num_few >= MAX_LOSSES:
            message = (
                f"{self._named}: the replica of pool {self._pool!r} that worked on it ended, {len(self._places)} times"
                f" ({', then '.join(self._places)}); it is not tried again"
            )
            log.warning("%s", message)
            raise TurnoutError(Code.INTERNAL, message)

    def refused(self) -> None:
        """There was no room for the next attempt: wait longer."""
        self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)


class Replay:
    """One generation over all its attempts. The call must have a seed.

    Args:
        call: as the client made it.
        pool: which pool answers.
        clock: seconds.
        on_decision: called with each decision about it.
    """

    def __init__(
        self,
        call: GenerateCall,
        pool: str,
        clock: Callable[[], float] = time.monotonic,
        on_decision: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.attempts = Attempts(call.request_id, pool)
        self._first = call
        self._clock = clock
        self._on_decision = on_decision
        self._began = clock()
        self._first_token_s = 0.0
        self._answers = [_Answer([]) for _ in range(call.sampling.n)]
        self._decided = call.decided
        self._moved: Moved | None = None

    @property
    def call(self) -> GenerateCall:
        """The call for the next attempt: with the time that is left, and what the client has."""
        first = self._first
        if not self.attempts.num_lost:
            return first
        left_s = first.deadline_s
        if left_s is not None:
            left_s = max(left_s - (self._clock() - self._began), 0.001)
        delivered = tuple(answer.delivered() for answer in self._answers)
        decided = self._decided
        if not any(each.tokens or each.chars or each.reasoning_chars or each.finished for each in delivered):
            delivered, decided = (), first.decided  # nothing binds
        return replace(first, deadline_s=left_s, delivered=delivered, decided=decided, moved=self._moved)

    def take(self, batch: Batch, collected: bool = False) -> Batch:
        """What of a batch is for the client; remembered as delivered.

        Args:
            batch: what came.
            collected: it came all at once: when its first token was made is not known.
        """
        shown: list[Event] = []
        for event in batch:
            if isinstance(event, Decided):
                self._decided = event.decision
                if self._on_decision is not None:
                    self._on_decision(event.decision)
            elif isinstance(event, Regained):
                self.attempts.regained()
            elif isinstance(event, Chunk):
                if self._count(event, collected):
                    shown.append(event)
            elif isinstance(event, Usage):
                shown.append(self._whole(event))
            else:
                shown.append(event)
        return tuple(shown)

    def _count(self, chunk: Chunk, collected: bool) -> bool:
        answer = self._answers[chunk.index]
        if answer.finished:
            return False
        if chunk.tokens and not self._first_token_s and not collected:
            self._first_token_s = self._clock() - self._began
        answer.tokens += [token.id for token in chunk.tokens]
        answer.chars += len(chunk.text)
        answer.reasoning_chars += len(chunk.reasoning)
        answer.finished = chunk.finish_reason is not None
        if chunk.tokens or chunk.text or chunk.reasoning or answer.finished:
            self.attempts.went_on(len(chunk.tokens))
        return True

    def _whole(self, usage: Usage) -> Usage:
        """The usage of all attempts: times count from the first one."""
        lost = self.attempts.num_lost
        if not lost:
            return usage
        times = "once" if lost == 1 else f"{lost} times"
        note = f"the replica that answered was lost {times}; another one went on"
        ttft_s = self._first_token_s or usage.ttft_s
        return replace(usage, ttft_s=ttft_s, wall_s=self._clock() - self._began, notes=(*usage.notes, note))

    def lost(self, loss: LostError, apart: bool = True) -> None:
        """See `Attempts.lost`."""
        self.attempts.lost(loss, apart)
        self._moved = loss.moved


class SerialGate:
    """Gate of one pool: attempts of quarantined calls run one at a time, in order of arrival; all others pass."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    def turn(self, attempts: Attempts) -> GatePass:
        """A place for one attempt, as an asynchronous context."""
        return GatePass(self._one if attempts.quarantined else None)


class GatePass:
    """Pass of one attempt; `over` returns it early, once the call has made progress."""

    def __init__(self, lock: asyncio.Lock | None) -> None:
        self._lock = lock

    @property
    def lasts(self) -> bool:
        """Whether no other quarantined call runs meanwhile."""
        return self._lock is not None

    async def __aenter__(self) -> GatePass:
        if self._lock is not None:
            await self._lock.acquire()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.over()

    def over(self) -> None:
        """Let the next one in."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
