"""Shadow traffic: requests run a second time, in another way, while the models are idle."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Protocol, TypeVar, cast

from decoding.decode_loop import LONGEST_STRETCH
from decoding.model import Model, ModelPool, StopCondition, WrappedModel
from decoding.operations import Decode, Operation
from decoding.read_spec import Decoded
from decoding.sequence import Sequence
from router.hashing import share_of
from turnout.errors import Code, TurnoutError
from turnout.types import Segment, Token

R = TypeVar("R")

log = logging.getLogger(__name__)

Run = Callable[[], Awaitable[None]]


class Background(Protocol):
    """How much runs in the background; `turnout.config.ShadowConfig` and `AuditConfig` say so."""

    @property
    def share(self) -> float:
        """Of the requests, from 0 to 1."""
        ...

    @property
    def beside(self) -> int:
        """Most requests in progress at which it still runs."""
        ...

    @property
    def max_running(self) -> int:
        """Begun and not finished, at most."""
        ...

    @property
    def max_waiting(self) -> int:
        """Waiting, at most; more are dropped."""
        ...

    @property
    def timeout_s(self) -> float:
        """From the begin of one until it is dropped, seconds."""
        ...


class Gate:
    """Gate that is open while at most `most` requests are in progress."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._present = 0
        self._open = asyncio.Event()
        self._open.set()

    def enter(self) -> None:
        """A request has come."""
        self._present += 1
        if self._present > self._most:
            self._open.clear()

    def leave(self) -> None:
        """It has ended."""
        self._present -= 1
        if self._present <= self._most:
            self._open.set()

    async def passed(self) -> None:
        """Wait until it is open; another request may have come in the moment it was opened."""
        while not self._open.is_set():
            await self._open.wait()


class _Turn:
    """Waits for the gate on behalf of one shadow; its clock stands still meanwhile.

    Without that, whatever chooses among drafters by their speed would hear how busy the pool's requests were.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._num_waiting = 0
        self._since = 0.0
        self._waited_s = 0.0

    async def comes(self) -> None:
        """The gate is open."""
        if not self._num_waiting:
            self._since = perf_counter()
        self._num_waiting += 1
        try:
            await self._gate.passed()
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self._waited_s += perf_counter() - self._since

    def clock(self) -> float:
        """Seconds in which nothing of this shadow waited for the gate."""
        return (self._since if self._num_waiting else perf_counter()) - self._waited_s


class _Deferring(WrappedModel):
    """A model every operation of which begins when the gate is open."""

    def __init__(self, model: Model, turn: _Turn) -> None:
        super().__init__(model)
        self._turn = turn

    async def do(self, seq: Sequence, op: Operation[R]) -> R:
        """See `decoding.model.Model.do`."""
        if isinstance(op, Decode):
            return cast(R, await self._decode(seq, op.until.twins()))
        await self._turn.comes()
        return await self.inner.do(seq, op)

    async def _decode(self, seq: Sequence, until: StopCondition) -> Decoded:
        """In pieces, because some methods write a whole answer in one stretch."""
        tokens: list[Token] = []
        left = until.max_tokens
        while True:
            await self._turn.comes()
            most = LONGEST_STRETCH if left is None else min(left, LONGEST_STRETCH)
            piece = await self.inner.decode(seq, replace(until, max_tokens=most))
            tokens += piece.tokens
            left = None if left is None else left - len(piece.tokens)
            if piece.stopped_by != "max_tokens" or (left is not None and left <= 0):
                return Decoded(Segment(tuple(tokens), piece.stopped_by), until.rules)


def deferring(models: ModelPool, gate: Gate) -> ModelPool:
    """The pool as a shadow sees it."""
    turn = _Turn(gate)
    behind: dict[str, Model] = {name: _Deferring(model, turn) for name, model in models.models.items()}
    return replace(models, models=behind, clock=turn.clock)


class Shadows:
    """Runs a share of the requests again, after they have been answered.

    A shadow begins when its request has ended, holds no place of the pool, and asks a model for something only while
    no more than `config.beside` requests are in progress: it waits between two operations, so that a request that
    comes meets at most one operation that is under way. When a request finds the pool full, all are dropped.

    Args:
        config: how many, which share.
        seed: of the choice of requests.
    """

    def __init__(self, config: Background, seed: int = 0) -> None:
        self.config = config
        self.gate = Gate(config.beside)
        self._seed = seed
        self._waiting: deque[tuple[str, Run]] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._due: set[asyncio.Task[None]] = set()
        self._closed = False
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running) + len(self._due)

    def wants(self, tenant: str, request_id: str) -> bool:
        """Whether a request is one of the share: the same ones always."""
        return share_of(self._seed, "shadow", tenant, request_id) < self.config.share

    @contextmanager
    def during_request(self, full: Callable[[], bool]) -> Iterator[None]:
        """A request is in progress for as long as the context lasts.

        Args:
            full: whether the pool has no room for it.
        """
        self.gate.enter()
        if full():
            self.drop()
        try:
            yield
        finally:
            self.gate.leave()

    def offer(self, request_id: str, run: Run, due: bool = False) -> None:
        """A request has been answered; `run` is to run it again.

        Args:
            request_id: whose it was.
            run: does it.
            due: at once, whatever is in progress; a full pool does not end it.
        """
        if self._closed:
            return
        if due:
            task = asyncio.create_task(self._tried(request_id, run))
            self._due.add(task)
            task.add_done_callback(self._due.discard)
        elif len(self._running) < self.config.max_running:
            self._begin(request_id, run)
        elif len(self._waiting) < self.config.max_waiting:
            self._waiting.append((request_id, run))
        else:
            self.num_dropped += 1

    def drop(self) -> list[asyncio.Task[None]]:
        """End all; what they hold is given back within a step.

        Returns:
            Those that had begun.
        """
        self.num_dropped += len(self._waiting)
        self._waiting.clear()
        running = list(self._running)
        for task in running:
            task.cancel()
        return running

    async def close(self) -> None:
        """End all and wait for it; nothing begins any more."""
        self._closed = True
        for task in self._due:
            task.cancel()
        await asyncio.gather(*self.drop(), *self._due, return_exceptions=True)

    def _begin(self, request_id: str, run: Run) -> None:
        task = asyncio.create_task(self._run(request_id, run))
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if task.cancelled():
            self.num_dropped += 1
        while self._waiting and len(self._running) < self.config.max_running and not self._closed:
            self._begin(*self._waiting.popleft())

    async def _run(self, request_id: str, run: Run) -> None:
        # Before it holds anything: a shadow that has not begun costs nothing.
        await self.gate.passed()
        await self._tried(request_id, run)

    async def _tried(self, request_id: str, run: Run) -> None:
        try:
            await run()
        except TurnoutError as error:
            if error.code in (Code.DEADLINE_EXCEEDED, Code.CANCELLED):
                self.num_dropped += 1
            log.debug("shadow of %s: %s", request_id, error.message)
        except Exception:
            log.exception("shadow of %s failed", request_id)
