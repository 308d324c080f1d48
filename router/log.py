"""The route log: one JSON line per routed request, written by a thread of its own."""

from __future__ import annotations

import logging
import os
import queue
from contextlib import suppress
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path
from typing import Any

from turnout.config import RouteLogConfig
from turnout.errors import invalid
from turnout.json_lines import json_line

MOST_WAITING = 10_000
CHUNK_BYTES = 1 << 16

log = logging.getLogger(__name__)


class _Lines(logging.Formatter):
    """Entries as JSON; runs in the writing thread."""

    def format(self, record: logging.LogRecord) -> str:
        return json_line(record.msg, default=str)


class _Files(RotatingFileHandler):
    """A full disk costs entries, not requests, and is said once."""

    failed = False
    lost = 0

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        self.lost += 1
        if not self.failed:
            self.failed = True
            log.warning("%s: cannot be written; entries are lost", self.baseFilename, exc_info=True)


class _Hand(QueueHandler):
    """Hands entries over as they are."""

    dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            if not self.dropped:
                log.warning("the route log: entries come faster than they can be written; some are lost")
            self.dropped += 1


class RouteLog:
    """Appends entries to a file that is renamed and begun anew when it is full.

    Args:
        config: the file and its size.
        alone: whether no other process writes to the same file; otherwise the process id becomes part of its name.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the file cannot be opened.
    """

    def __init__(self, config: RouteLogConfig, alone: bool = True, field: str = "routing.log.path") -> None:
        path = Path(config.path).expanduser()
        if not alone:
            path = path.with_name(f"{path.stem}-{os.getpid()}{path.suffix}")
        self.path = path
        self.texts = config.texts
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _drop_cut_line(path)
            files = _Files(path, maxBytes=config.max_bytes, backupCount=config.backups, encoding="utf-8")
        except OSError as error:
            raise invalid(field, f"cannot write {config.path}: {error.strerror}") from None
        files.setFormatter(_Lines())
        waiting: queue.Queue[Any] = queue.Queue(MOST_WAITING)
        self._hand = _Hand(waiting)
        self._listener = QueueListener(waiting, files)
        self._files = files
        self._closed = False
        self._listener.start()

    @property
    def num_dropped(self) -> int:
        """Entries lost: they came faster than they could be written, or the file could not be written."""
        return self._hand.dropped + self._files.lost

    def write(self, entry: dict[str, Any]) -> None:
        """Hand an entry over; returns at once."""
        stamped = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **entry}
        self._hand.handle(logging.LogRecord("route", logging.INFO, "", 0, stamped, None, None))

    def close(self) -> None:
        """Write what waits, and close the file; blocks for as long as that takes. What comes later is lost."""
        if not self._closed:
            self._closed = True
            self._listener.stop()
            with suppress(OSError):  # what the disk has no room for was counted when its turn came
                self._files.close()
            if self.num_dropped:
                log.warning("%s: %d entries were lost", self.path, self.num_dropped)


def _drop_cut_line(path: Path) -> None:
    """Cut off an entry that was written in part when its process ended: the next one would be glued to it."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(end - CHUNK_BYTES, 0)
            file.seek(start)
            if (place := file.read(end - start).rfind(b"\n")) >= 0:
                end = start + place + 1
                break
            end = start
        file.truncate(end)
