"""The folder a job works in: its input cut into blocks, what became of each, and nothing that a crash can spoil.

lock               held by who cuts the input and hands out blocks
job.json           what the job is; another one is refused
staged.json        written last: the input is cut; its number of lines
in/BLOCK           requests, those with a common beginning next to each other
part/BLOCK         the journal of a block that is being answered
done/BLOCK         ... that has been
done/BLOCK.json    what it used
asked/PROCESS      numbers of the lines that a process has asked
tried/BLOCK        how often a block was begun that is not done
faults             the journal of lines that are no requests
looked             the folder of a job before this one, that looks at each line
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from heapq import merge
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

from deployments.batches.attempts import LOADING, AttemptLog
from deployments.batches.disk import named
from deployments.batches.inputs import Fault
from deployments.batches.journal import Journal
from deployments.batches.lines import Line, beginning, request_id_of, unread
from deployments.batches.reading import windows
from deployments.batches.spent import Spent
from turnout.atomic_files import write_whole
from turnout.errors import Code, TurnoutError, invalid
from turnout.json_lines import json_line

WINDOW = 64  # blocks over which requests are put in order
FORMAT = 2
# All that a job leaves in its folder. staged.json goes first: without blocks it would speak of an empty job, which is
# done. job.json goes last, so that what is left is known for ours.
FOLDERS = ("in", "part", "done", "asked", "tried")
NAMES = ("staged.json", *FOLDERS, "faults", "ids", "checkpoint", "written", "looked", "blocks.parquet")


@dataclass(frozen=True, slots=True)
class Staged:
    """An input that has been cut.

    Attributes:
        lines: requests.
        faults: lines that are none.
        blocks: how many the requests were cut into.
    """

    lines: int
    faults: int
    blocks: int


@dataclass(frozen=True, slots=True)
class JobDirectory:
    """A job's folder.

    Args:
        folder: on a disk that all its actors share.
    """

    folder: Path

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other runs out of the folder, which is made where it is absent.

        Raises:
            TurnoutError: UNAVAILABLE: another run works in it.
        """
        with named(str(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TurnoutError(Code.UNAVAILABLE, f"work: another run works in {self.folder}", "work") from None
            yield
        finally:
            os.close(handle)

    def open(self, job: dict[str, Any], fresh: bool) -> bool:
        """Make the folder, or go on in it.

        Args:
            job: what decides about the answers; plain values.
            fresh: forget what was done.

        Returns:
            Whether something had been begun.

        Raises:
            TurnoutError: INVALID_ARGUMENT: another job has been begun there, or files that are no job's lie there.
        """
        wanted = json.dumps({"format": FORMAT, **job}, sort_keys=True)
        path = self.folder / "job.json"
        with named(str(self.folder)):
            if not path.exists() and (others := [name for name in NAMES if (self.folder / name).exists()]):
                raise invalid("work", f"{self.folder} holds files that are no job's: {', '.join(others)}")
            if fresh:
                for name in (*NAMES, path.name):
                    _remove(self.folder / name)
            begun = path.exists()
            if begun:
                if path.read_text() != wanted:
                    changed = _changed(json.loads(path.read_text()), json.loads(wanted))
                    raise invalid(
                        "work", f"{self.folder} holds another job (other: {changed}); finish it, or use --fresh"
                    )
            else:
                self.folder.mkdir(parents=True, exist_ok=True)
                write_whole(path, wanted.encode())
            for name in FOLDERS:
                (self.folder / name).mkdir(exist_ok=True)
        return begun

    @property
    def job_id(self) -> str:
        """Names the job: the same each time it is begun."""
        return hashlib.blake2b((self.folder / "job.json").read_bytes(), digest_size=12).hexdigest()

    @property
    def staged(self) -> Staged | None:
        """The input that was cut; None: it has not been, or not to its end."""
        path = self.folder / "staged.json"
        return Staged(**json.loads(path.read_text())) if path.exists() else None

    def stage(self, rows: Iterable[Line | Fault], block_rows: int, limit: int | None) -> Staged:
        """Cut an input into blocks. Of lines with one id, the first is served, the others are faults.

        Args:
            rows: the input.
            block_rows: requests of a block.
            limit: lines looked at; None: all.

        Raises:
            TurnoutError: the input cannot be read, or the disk is full.
        """
        with named(str(self.folder)):
            # What a job before this one left, if it was forgotten in part only, would pass for this one's.
            for name in NAMES:
                if name != "looked":
                    _remove(self.folder / name)
            for name in FOLDERS:
                (self.folder / name).mkdir()
            num_lines = 0
            with (
                closing(Journal(self.folder / "faults")) as faults,
                closing(sqlite3.connect(self.folder / "ids", isolation_level=None)) as ids,
            ):
                good = _distinct(islice(rows, limit), self.job_id, faults, ids)
                written = ((beginning(line), json_line(asdict(line))) for line in good)
                for window, lines in enumerate(windows(written, WINDOW * block_rows)):
                    self._write_window(window, lines, block_rows)
                    num_lines += len(lines)
                faults.sync()
                staged = Staged(num_lines, len(faults), len(self.blocks()))
            _remove(self.folder / "ids")
            write_whole(self.folder / "staged.json", json.dumps(asdict(staged)).encode())
        return staged

    def _write_window(self, window: int, lines: list[tuple[str, str]], block_rows: int) -> None:
        """Requests that begin alike go next to each other: what they share is then computed once."""
        texts = [text for _, text in sorted(lines, key=itemgetter(0))]
        for place, start in enumerate(range(0, len(texts), block_rows)):
            data = "".join(f"{text}\n" for text in texts[start : start + block_rows]).encode()
            digest = hashlib.blake2b(data, digest_size=8).hexdigest()
            write_whole(self.folder / "in" / f"{window:06d}-{place:02d}-{digest}", data)

    def blocks(self) -> list[str]:
        """Names of all blocks, in the order of the input's windows."""
        return sorted(path.name for path in (self.folder / "in").iterdir() if not path.name.startswith("."))

    def check_blocks(self, staged: Staged) -> None:
        """Whether the input is still there as it was cut.

        Raises:
            TurnoutError: UNAVAILABLE: a block is gone, and with it its requests.
        """
        found = len(self.blocks())
        if found != staged.blocks:
            message = f"work: {self.folder} holds {found} blocks of {staged.blocks}: it was changed from outside"
            raise TurnoutError(Code.UNAVAILABLE, f"{message}; begin anew with --fresh", "work")

    def is_done(self, block: str) -> bool:
        """Whether all of a block has been answered."""
        return (self.folder / "done" / block).exists()

    def lines(self, block: str) -> list[Line]:
        """Requests of a block.

        Raises:
            OSError: it cannot be read.
        """
        with (self.folder / "in" / block).open("rb") as file:
            return [Line(**json.loads(data)) for data in file]

    def begin(self, block: str) -> Journal | None:
        """What has become of a block so far. None: all of it has been answered.

        Raises:
            OSError: it cannot be opened; BlockingIOError while another process works on it.
        """
        path = self.folder / "part" / block
        journal = Journal(path)
        if self.is_done(block):  # by who held it until now; ours is the one that was finished, or a new, empty one
            path.unlink(missing_ok=True)
            journal.close()
            return None
        return journal

    def asking(self, process: str) -> BinaryIO:
        """Where a process notes the number of each line that it asks, a line each, before it does; not buffered.

        Raises:
            OSError: it cannot be opened.
        """
        return (self.folder / "asked" / process).open("ab", buffering=0)

    def num_redone(self) -> int:
        """Lines that were asked again, because a process had ended before it had their answer."""
        total, distinct = 0, set[bytes]()
        for path in (self.folder / "asked").iterdir():
            numbers = path.read_bytes().split()
            total += len(numbers)
            distinct.update(numbers)
        return total - len(distinct)

    def tries(self, name: str) -> AttemptLog:
        """What is known of a block's tries, or of what else may end a process.

        Raises:
            OSError: it cannot be read.
        """
        return AttemptLog(self.folder / "tried" / name)

    def forget_tries(self) -> None:
        """Forget failed attempts: a new run may have fixed their cause.

        Raises:
            OSError: they cannot be removed.
        """
        for path in (self.folder / "tried").iterdir():
            path.unlink(missing_ok=True)

    def most_begun(self) -> int:
        """Times the block was begun that was begun most often and is not done; 0: none is in hand."""
        paths = [path for path in (self.folder / "tried").iterdir() if path.name != LOADING]
        return max((AttemptLog(path).begun for path in paths), default=0)

    def finish(self, block: str, spent: Spent) -> None:
        """A block has been answered, and its journal is on disk."""
        write_whole(self.folder / "done" / f"{block}.json", json.dumps(asdict(spent)).encode())
        (self.folder / "part" / block).replace(self.folder / "done" / block)
        self.tries(block).end()

    def spent(self, block: str) -> Spent:
        """What the answers of a block used."""
        return Spent(**json.loads((self.folder / "done" / f"{block}.json").read_text()))

    def records(self, answered: bool) -> Iterator[dict[str, Any]]:
        """What is written for lines that were answered, or for those that failed; in the order of the input.

        Lines that are no requests come before the first request after them.

        Raises:
            OSError: it cannot be read.
        """
        with closing(Journal(self.folder / "faults")) as faults:
            bad = iter(()) if answered else faults.entries(answered=False)
            for _, record in merge(bad, self._entries(answered), key=itemgetter(0)):
                yield record

    def _entries(self, answered: bool) -> Iterator[tuple[int, dict[str, Any]]]:
        """The same with their numbers, of what was asked; of each block that is read, one is held."""
        for _, blocks in _windows(self.blocks()):
            with ExitStack() as journals:
                opened = [
                    journals.enter_context(closing(_finished(self.folder / "done" / block, self.spent(block).rows)))
                    for block in blocks
                ]
                yield from merge(*(journal.entries(answered) for journal in opened), key=itemgetter(0))

    def partly(self) -> int:
        """Lines that have a result in blocks that are not done."""
        total = 0
        for path in (self.folder / "part").iterdir():
            # One that is finished meanwhile lies elsewhere by now.
            with suppress(FileNotFoundError), path.open("rb") as file:
                total += sum(piece.count(b"\n") for piece in iter(lambda: file.read(1 << 20), b""))
        return total


def _finished(path: Path, rows: int) -> Journal:
    """The journal of a block that is done; one that has lost results since must not pass for all there is."""
    journal = Journal(path) if path.exists() else None
    found = 0 if journal is None else len(journal)
    if journal is not None and found == rows:
        return journal
    if journal is not None:
        journal.close()
    message = f"{path} holds {found} results of {rows}: it was changed from outside; --fresh begins anew"
    raise TurnoutError(Code.UNAVAILABLE, message)


def _windows(blocks: list[str]) -> Iterator[tuple[str, list[str]]]:
    found: dict[str, list[str]] = {}
    for block in blocks:
        found.setdefault(block.partition("-")[0], []).append(block)
    yield from found.items()


def _changed(before: dict[str, Any], now: dict[str, Any]) -> str:
    return ", ".join(sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key)))


def _distinct(rows: Iterable[Line | Fault], job: str, faults: Journal, ids: sqlite3.Connection) -> Iterator[Line]:
    """Requests, the first of each id; all other rows go to the faults."""
    ids.execute("pragma journal_mode=off")
    ids.execute("pragma synchronous=off")
    ids.execute("create table seen (id text primary key) without rowid")
    for row in rows:
        if isinstance(row, Fault):
            faults.append(unread(row.number, request_id_of(job, row.number), None, row.error))
        elif ids.execute("insert or ignore into seen values (?)", (row.custom_id,)).rowcount:
            yield row
        else:
            error = invalid("custom_id", f"{row.custom_id[:100]!r} is that of an earlier line")
            faults.append(unread(row.number, request_id_of(job, row.number), row.custom_id, error))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
