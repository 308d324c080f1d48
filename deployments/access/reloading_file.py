"""A file that is read again when it changes, by a thread of its own; while it is broken, what it said before holds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from turnout.errors import TurnoutError

log = logging.getLogger("ray.serve")

T = TypeVar("T")
POLL_S = 0.5  # a change holds within two seconds, reading included


class ReloadingFile(Generic[T]):
    """What a file says.

    Looking at the file's name, size and times works on every file system and for every way of replacing it, where
    notifications of changes do not. One that could not be used is read again at each look: what kept it from being read
    may be over without a trace on the file.

    Args:
        path: the file.
        read: what it means; raises TurnoutError where it is broken.
        poll_s: time between two looks, in seconds.

    Raises:
        TurnoutError: it is broken from the start.
    """

    def __init__(self, path: Path, read: Callable[[Path], T], poll_s: float = POLL_S) -> None:
        self._path = path
        self._read = read
        self._poll_s = poll_s
        self._seen = _signature(path)
        self._value = read(path)
        self._fault: str | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"watch {path.name}", daemon=True)
        self._thread.start()

    @property
    def value(self) -> T:
        """What it said when it was last whole."""
        return self._value

    @property
    def fault(self) -> str | None:
        """Why what it says now is not used; None: it is."""
        return self._fault

    def close(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._poll_s):
            signature = _signature(self._path)
            if signature == self._seen and self._fault is None:
                continue
            try:
                self._value = self._read(self._path)
            except TurnoutError as error:
                self._failed(error.message)
            except Exception as error:
                self._failed(f"{self._path}: cannot be read ({type(error).__name__})", error)
            else:
                self._seen, self._fault = signature, None
                log.info("%s: read again", self._path)

    def _failed(self, fault: str, error: Exception | None = None) -> None:
        if fault != self._fault:
            log.warning("%s; its previous content stays in use", fault, exc_info=error)
        self._fault = fault


def _signature(path: Path) -> tuple[int, ...] | None:
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns
