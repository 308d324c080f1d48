"""Usage records: one JSON line for every billed request, written by a thread of its own.

Nothing is lost in silence. A request is let in only while there is room for its record; where the disk is full, records
wait, the room runs out, and requests are refused until it can be written again. Each process writes files of its own,
so that no two lines ever mix; they are only ever appended to. A process that is killed takes with it what it had not
written, and may leave half a line, which readers leave out.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections import deque
from datetime import UTC, datetime
from pathlib import Path

from deployments.access.usage_record import UsageRecord
from deployments.access.usage_sums import Days, FileSums, write_sums
from turnout.access_config import UsageConfig
from turnout.errors import Code, TurnoutError, invalid

log = logging.getLogger("ray.serve")

RETRY_S = 1.0
MODE = 0o640


class UsageRecords:
    """Appends records to files of this process's own.

    Args:
        config: where, and how.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the folder cannot be written.
    """

    def __init__(self, config: UsageConfig) -> None:
        self._config = config
        self._folder = Path(config.folder).expanduser()
        self._name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"
        self._num_files = 0
        self._size = 0
        self._sums = Days()
        self._change = threading.Condition()
        self._waiting: deque[tuple[UsageRecord, bytes]] = deque()
        self._promised = 0
        self._unwritten = 0
        self._closed = False
        self._failing = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._path, self._file = self._open()
        except OSError as error:
            raise invalid("access.usage.folder", f"cannot write {config.folder}: {error.strerror}") from None
        self._thread = threading.Thread(target=self._run, name="usage records", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Records not written yet, those of running requests included."""
        with self._change:
            return self._promised + self._unwritten

    def owns(self, path: Path) -> bool:
        """Whether a file is one of those that are written here."""
        return path.name.startswith(f"usage-{self._name}-")

    def promise(self) -> None:
        """Keep room for one record; `write` follows.

        Raises:
            TurnoutError: UNAVAILABLE: there is none.
        """
        with self._change:
            if self._closed or self._promised + self._unwritten >= self._config.max_waiting:
                message = "usage cannot be recorded fast enough; try again later"
                raise TurnoutError(Code.UNAVAILABLE, message, retry_after_s=RETRY_S)
            self._promised += 1

    def write(self, record: UsageRecord) -> None:
        """Hand over a record for which there is room; returns at once."""
        line = record.model_dump_json(exclude_none=True).encode() + b"\n"
        with self._change:
            self._promised -= 1
            self._unwritten += 1
            self._waiting.append((record, line))
            self._change.notify_all()

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until all that was handed over is written; whether it was."""
        with self._change:
            return self._change.wait_for(lambda: self._unwritten == 0, timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what waits, within a limited time in seconds, and accept no more."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while waiting := self._take():
            if not self._stored([record for record, _ in waiting], b"".join(line for _, line in waiting)):
                log.error("%d usage records are lost: they could not be written", len(waiting))
            with self._change:
                self._unwritten -= len(waiting)
                self._change.notify_all()
        self._end_file()

    def _take(self) -> list[tuple[UsageRecord, bytes]]:
        with self._change:
            self._change.wait_for(lambda: self._waiting or self._closed)
            waiting = list(self._waiting)
            self._waiting.clear()
            return waiting

    def _stored(self, records: list[UsageRecord], data: bytes) -> bool:
        """Write until it is done; False: it cannot be, and the process ends."""
        while True:
            try:
                self._append(data)
            except OSError as error:
                if not self._failing:
                    log.error("%s: usage cannot be written (%s); it waits", self._folder, error.strerror)
                self._failing = True
                with self._change:
                    if self._change.wait_for(lambda: self._closed, RETRY_S):
                        return False
            else:
                self._failing = False
                for record in records:
                    self._sums.add(record)
                return True

    def _append(self, data: bytes) -> None:
        if self._size and self._size + len(data) > self._config.max_bytes:
            path, file = self._open()
            self._end_file()
            self._path, self._file, self._size, self._sums = path, file, 0, Days()
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
            if self._config.sync == "always":
                os.fsync(self._file)
        except OSError:
            # Nothing of it stays: it is written again as a whole.
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)

    def _end_file(self) -> None:
        """Mark the file as complete: a process that starts need not read its records."""
        os.close(self._file)
        if self._size:
            write_sums(self._path, FileSums(num_bytes=self._size, days=self._sums.sums))

    def _open(self) -> tuple[Path, int]:
        path = self._folder / f"usage-{self._name}-{self._num_files:04d}.jsonl"
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, MODE)
        self._num_files += 1
        return path, file
