"""A thread that runs what it is given, one piece of work after the other."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

T = TypeVar("T")
Work = Callable[[], None]


class WorkerThread:
    """A thread with a queue. It costs a third of an executor's hop: no second future, no condition for each piece.

    It ends with `close`, or when this is forgotten.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._working_since: float | None = None
        self._putting = Lock()  # nothing may be put behind the end, where it would wait for ever
        self._thread = Thread(target=_serve, args=(self._queue,), name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._queue.put, None)

    @property
    def working_s(self) -> float:
        """How long it has been at its present work, in seconds; 0.0: it has none that `run` was given."""
        since = self._working_since
        return time.monotonic() - since if since is not None else 0.0

    def note_working(self) -> None:
        """Note that it begins another piece of its present work."""
        self._working_since = time.monotonic()

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Queue a piece of work; the running event loop gets what it returns or raises.

        Raises:
            RuntimeError: the thread was closed.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def piece() -> None:
            self.note_working()
            try:
                result = work()
            except BaseException as error:
                self._working_since = None
                hand_over(_fail, error)
            else:
                self._working_since = None
                hand_over(_succeed, result)

        def hand_over(how: Callable[[asyncio.Future[Any], Any], None], value: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed: the result is of no use to anyone
                loop.call_soon_threadsafe(how, future, value)

        self._put(piece)
        return future

    def call(self, work: Callable[[], T]) -> T:
        """Queue a piece of work and wait for it, on any thread but this one and those that run event loops.

        Raises:
            RuntimeError: the thread was closed.
        """
        future: Future[T] = Future()

        def piece() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self._put(piece)
        return future.result()

    @property
    def has_waiting(self) -> bool:
        """Whether work waits behind that in progress."""
        return not self._queue.empty()

    def close(self) -> None:
        """Finish what is queued, and end the thread."""
        with self._putting:
            self._end()
        self._thread.join()

    def _put(self, piece: Work) -> None:
        with self._putting:
            if not self._end.alive:
                raise RuntimeError(f"thread {self._thread.name} was closed")
            self._queue.put(piece)


def _serve(queue: SimpleQueue[Work | None]) -> None:
    while (piece := queue.get()) is not None:
        piece()
        del piece  # what it refers to must not live until the next one comes


def _succeed(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
