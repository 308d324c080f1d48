"""What became of each line of a batch so far: a file that only grows, and is read again after a crash."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deployments.batches.lines import Result
from turnout.atomic_files import whole
from turnout.json_lines import json_line


class Journal:
    """Results by line number, each once. What is appended survives the end of the process.

    A last line that was not written whole is dropped when the file is opened.

    Args:
        path: made where it is absent.

    Raises:
        OSError: it cannot be opened; BlockingIOError where another process has it open.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: dict[int, tuple[int, bool]] = {}  # line -> (where its result begins, whether it was answered)
        self._num_answered = 0
        self._end = 0
        self._unsynced = False
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._load()
        except BaseException:
            os.close(self._handle)
            raise

    def _load(self) -> None:
        # Not by its path: who held it before may have renamed it meanwhile.
        with open(self._handle, "rb", closefd=False) as file:
            for data in file:
                if not data.endswith(b"\n"):
                    break
                head, _, _ = data.partition(b" ")
                self._note(int(head[1:]), head[:1] == b"+", len(data))
        os.ftruncate(self._handle, self._end)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, number: int) -> bool:
        return number in self._places

    @property
    def num_answered(self) -> int:
        """Lines that have an answer; the others failed."""
        return self._num_answered

    def _note(self, number: int, ok: bool, size: int) -> None:
        self._places[number] = (self._end, ok)
        self._num_answered += ok
        self._end += size

    def append(self, result: Result) -> None:
        """Keep a line's result; of two for one line, the first.

        Raises:
            OSError: there is no room; nothing was written.
        """
        if result.number in self._places:
            return
        sign = "+" if result.ok else "-"
        data = f"{sign}{result.number} {result.written or json_line(result.record)}\n".encode()
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._handle, data[done:], self._end + done)
        except OSError:
            os.ftruncate(self._handle, self._end)
            raise
        self._note(result.number, result.ok, len(data))
        self._unsynced = True

    def sync(self) -> None:
        """Wait until all of it is on disk.

        Raises:
            OSError: the disk failed.
        """
        if self._unsynced:
            self._unsynced = False
            os.fsync(self._handle)

    def export(self, path: Path, answered: bool) -> int:
        """Write the lines that were answered, or those that failed, in the order of the input.

        Returns:
            How many there are; without any, no file is written.

        Raises:
            OSError: there is no room; nothing is left of the file.
        """
        wanted = sorted((number, place) for number, (place, ok) in self._places.items() if ok is answered)
        if not wanted:
            return 0
        with whole(path) as part, part.open("wb") as out, self._path.open("rb") as file:
            for _, place in wanted:
                file.seek(place)
                out.write(file.readline().partition(b" ")[2])
        return len(wanted)

    def entries(self, answered: bool) -> Iterator[tuple[int, dict[str, Any]]]:
        """Line numbers, and what is written for them: of the lines that were answered, or of those that failed."""
        wanted = sorted((number, place) for number, (place, ok) in self._places.items() if ok is answered)
        with self._path.open("rb") as file:
            for number, place in wanted:
                file.seek(place)
                yield number, json.loads(file.readline().partition(b" ")[2])

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)
