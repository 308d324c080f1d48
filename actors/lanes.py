"""A thread that does one thing after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Lane:
    """Jobs in the order they were put, on a thread of its own that ends nobody's exit.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], None]) -> None:
        """Do this after what was put before; a job raises nothing."""
        self._jobs.put(job)

    def end(self) -> None:
        """Do what was put before, then stop. Waits for nothing."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended, or does so in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # what it holds is not to wait for the next one
