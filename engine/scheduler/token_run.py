"""Token runs: steps of the same decode loops, one after the other on the device's thread, until something changes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Items

from decoding.model import Readout
from decoding.token_reader import TokenRows
from engine.runner import Feed, Runner
from engine.scheduler.metering import meter_tokens
from engine.scheduler.queued_operation import QueuedOperation
from engine.token_batch import TokenBatch

MOST_STEPS = 32
LONGEST_S = 0.1  # predicted, of a run
NEARLY = 0.5  # of a stretch
AHEAD = 2  # steps in front of what was handed out, where a text may end an answer

Rows = Items[list[Readout]]


class TokenRun:
    """A run of decode loops.

    The thread feeds each row's token to the next forward itself: nothing is planned, handed out, put into text or sent
    between two forwards. The event loop hands out what has come while later forwards run. That a text has ended is
    seen there, a step late; what was computed of that answer beyond its end is dropped: the slots are its own, and
    neither its cache nor its meter ever holds it.

    Args:
        works: the operations.
        feeds: their tokens in the first step; slots for `most` steps have been reserved.
        most: steps, at least 1; no loop has room for fewer.

    Attributes:
        fed: tokens of each that were fed and whose rows were handed out.
        faults: what handing out raised, by place.
        seconds: of each forward.
        error: of the forward that ended the run, if one failed.
    """

    def __init__(self, works: list[QueuedOperation], feeds: list[Feed], most: int) -> None:
        self.works = works
        self.fed = [0] * len(works)
        self.faults: dict[int, Exception] = {}
        self.seconds: list[float] = []
        self.error: Exception | None = None
        self._loops = [work.loop for work in works if work.loop is not None]
        self._feeds = feeds
        self._rows: list[Rows] = []
        self._most, self._taken = most, 0
        self._open = list(range(len(works)))
        self._wake_at = self._limit = most
        self._ends = frozenset[int]().union(*(work.table.seq.end_ids for work in works))
        self._watched = any(loop.watched for loop in self._loops)
        self._streams = any(loop.streams for loop in self._loops)
        self._stops = False
        self._bound()

    def stop(self) -> None:
        """Let no further forward begin."""
        self._stops = True

    def forwards(self, runner: Runner, changed: Callable[[], bool], wake: Callable[[], object]) -> None:
        """Run forwards; called on the device's thread.

        Args:
            runner: computes them.
            changed: whether something has changed, so that another step must be planned.
            wake: lets `take` be called on the event loop soon.
        """
        try:
            self._forwards(runner, changed, wake)
        except Exception as error:  # of a forward, or of laying one out
            self.error = error

    def _forwards(self, runner: Runner, changed: Callable[[], bool], wake: Callable[[], object]) -> None:
        rows, batch = self._rows, TokenBatch(self._feeds, runner.block_size, runner.device)
        while not self._stops and len(rows) < self._limit and not (rows and changed()):
            began = time.perf_counter()
            came = runner.run(batch)
            tokens = came.tokens if isinstance(came, TokenRows) else [row.token for [row] in came]
            self.seconds.append(time.perf_counter() - began)
            rows.append(came)
            if not self._ends.isdisjoint(tokens):
                return
            batch.advance(tokens)
            if len(rows) >= self._wake_at:
                self._wake_at = sys.maxsize
                wake()

    def take(self, name: str, num_parameters: int) -> None:
        """Hand out what has come, and meter it; called on the event loop.

        Args:
            name: of the model.
            num_parameters: of the model.
        """
        came = self._rows[self._taken :]
        if not came:
            return
        self._taken += len(came)
        plain = [rows.tokens for rows in came if isinstance(rows, TokenRows)]
        columns = list(zip(*plain, strict=True)) if len(plain) == len(came) else None
        for place in list(self._open):
            before = self.fed[place]
            try:
                continues = self._take(place, came, None if columns is None else list(columns[place]))
            except Exception as error:
                self.faults[place], continues = error, False
            # At once: an answer that is given up while later forwards run has been charged for what it got.
            meter_tokens(self.works[place], self.fed[place] - before, name, num_parameters)
            if not continues:
                self._open.remove(place)
                self._stops = True
        # Those nearly due are announced with those that are: answers that stream keep step, and wake together.
        if self._streams and any(loop.announce() for loop in self._loops):
            for loop in self._loops:
                loop.announce(NEARLY)
        self._bound()

    def _take(self, place: int, came: list[Rows], plain: list[int] | None) -> bool:
        work, loop = self.works[place], self._loops[place]
        if work.future.done() or work.table.released:
            return False
        if plain is not None:
            self.fed[place] += loop.take_plain(plain)
            return not loop.stopped_by
        for rows in came:
            self.fed[place] += 1
            if not loop.take(rows[place][0]):
                return False
        return True

    def _bound(self) -> None:
        """Say how many steps may be run before more is handed out, and after which one it is to be handed out."""
        if self._watched:
            self._limit, self._wake_at = min(self._taken + AHEAD, self._most), self._taken + 1
            return
        due = min([loop.num_before_due for loop in self._loops]) if self._streams else self._most
        self._limit, self._wake_at = self._most, self._taken + due

    def enter(self) -> None:
        """Enter what was handed out into the caches, and give back slots that were not needed."""
        for work, fed in zip(self.works, self.fed, strict=True):
            table, start = work.table, len(work.table.tokens)
            if fed:
                table.filled(table.seq.tokens[start : start + fed])
            table.trim(len(table.tokens))

    @property
    def ended(self) -> set[int]:
        """Places of operations that get no more tokens."""
        return set(range(len(self.works))).difference(self._open)
