"""One batch, from its file to the files of its answers; it can be begun again at any point."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from deployments.access.callers import C, Caller
from deployments.batches.disk import named
from deployments.batches.journal import Journal
from deployments.batches.lines import (
    MALFORMED,
    Line,
    Result,
    answer_line,
    beginning,
    failed,
    id_in,
    not_asked,
    read_line,
    request_id_of,
    seed_of,
    unread,
)
from deployments.batches.reading import ReadAhead, numbered_lines, windows
from deployments.batches.records import (
    MAX_ERRORS,
    BatchFault,
    BatchRecord,
    BatchState,
    BatchUsage,
    Counts,
    Status,
    progress_of,
)
from deployments.batches.retry import retried
from deployments.batches.spent import Spent
from deployments.batches.store import KEPT, BatchStore
from deployments.service import GenerationService
from turnout.errors import Code, TurnoutError, invalid

LOOK_S = 0.2  # between looks for word that the batch is to end
SAVE_S = 1.0
EXPIRED = "batch_expired"
WINDOW = 4096  # lines that are put in order at once
# These say nothing about the request: it is asked again, for as long as the batch may take.
PASSING = (Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.CANCELLED)


class BatchJob:
    """Works on a batch until it ends.

    Args:
        record: as it was kept last.
        store: where it is kept.
        service: whom to ask.
        room: how many requests of all batches are asked at once.
    """

    def __init__(
        self, record: BatchRecord, store: BatchStore, service: GenerationService, room: asyncio.Semaphore
    ) -> None:
        self.record = record
        self._store = store
        self._service = service
        self._room = room
        self._num_asked = 0

    @property
    def progress(self) -> dict[BatchState, int]:
        """Its lines by state."""
        return progress_of(self.record, self._num_asked)

    async def run(self) -> None:
        """Do what is left to do.

        Raises:
            TurnoutError: UNAVAILABLE: the disk is full or failed; it can be run again.
        """
        record = self.record
        journal = await _opened(self._store.work_folder(record) / "journal")
        try:
            if record.status == "validating":
                if self._store.is_cancelled(record):
                    await finish_in_thread(self._turn, "cancelling")
                else:
                    await finish_in_thread(self._validate, journal)
            if record.status == "in_progress":
                await self._serve(journal)
            if record.status in ("finalizing", "cancelling"):
                await finish_in_thread(self._finish, journal)
        except TurnoutError as error:
            if error.code is Code.UNAVAILABLE:
                raise
            # It would be the same the next time: its input is gone, or is no longer what was looked at.
            record.errors.append(BatchFault(code="unreadable", message=f"input_file_id: {error.message}"))
            await finish_in_thread(self._end, journal, "failed")
        finally:
            journal.close()

    def _validate(self, journal: Journal) -> None:
        """Look at every line; those that are no requests are refused now, the others served."""
        record, seen = self.record, set[str]()
        num_good = 0
        record.errors, record.request_counts = [], Counts()
        for number, data in self._lines():
            record.request_counts.total += 1
            try:
                line = self._line(number, data)
                if line.custom_id in seen:
                    raise invalid("custom_id", f"{line.custom_id[:100]!r} is that of an earlier line")
                seen.add(line.custom_id)
                num_good += 1
            except TurnoutError as error:
                self._refuse(journal, unread(number, request_id_of(record.id, number), id_in(data), error), error)
            if record.request_counts.total > self._store.config.max_requests:
                message = f"input_file_id: a batch has at most {self._store.config.max_requests} lines"
                record.errors.append(BatchFault(code="too_many_requests", message=message, param="input_file_id"))
                num_good = 0
                break
        with named(KEPT):
            journal.sync()
        self._count(journal)
        if num_good:
            self._turn("in_progress")
            return
        if not record.errors:
            record.errors.append(BatchFault(code="empty_file", message="input_file_id: the file has no line"))
        self._end(journal, "failed")

    def _refuse(self, journal: Journal, result: Result, error: TurnoutError) -> None:
        with named(KEPT):
            journal.append(result)
        if len(self.record.errors) < MAX_ERRORS:
            message = str(result.record["error"]["message"])
            fault = BatchFault(code=MALFORMED, message=message, line=result.number, param=error.field)
            self.record.errors.append(fault)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Lines of the input that are not empty, with their numbers."""
        record = self.record
        path = self._store.content(record.owner, record.input_file_id)
        with named(KEPT), path.open("rb") as file:
            yield from numbered_lines(file, self._service.max_body_bytes)

    def _line(self, number: int, data: bytes) -> Line:
        if len(data) > self._service.max_body_bytes:
            raise invalid("body", f"at most {self._service.max_body_bytes} bytes")
        return read_line(number, data, self.record.endpoint)

    async def _serve(self, journal: Journal) -> None:
        """Answer what has no answer yet, until all is done, time is over or the batch is cancelled."""
        self.record.usage = await finish_in_thread(_used, journal)
        left = ReadAhead(self._left(journal))
        workers = [asyncio.create_task(self._work(left, journal)) for _ in range(self._store.config.concurrency)]
        done = asyncio.gather(*workers)
        saved = time.monotonic()
        try:
            while not done.done() and not self._is_over():
                with suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(done), LOOK_S)
                if time.monotonic() >= saved + SAVE_S:
                    await finish_in_thread(self._keep, journal)
                    saved = time.monotonic()
            complete = done.done()
            if complete:
                done.result()
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await left.close()
        await finish_in_thread(self._keep, journal)
        status: Status = "finalizing" if complete or not self._store.is_cancelled(self.record) else "cancelling"
        await finish_in_thread(self._turn, status)

    def _is_over(self) -> bool:
        return time.time() >= self.record.expires_at or self._store.is_cancelled(self.record)

    def _left(self, journal: Journal) -> Generator[Line | Result, None, None]:
        """Lines that have no result yet; results of those that were requests when they were looked at.

        Lines of a window that begin alike are next to each other: what they share is then computed once.
        """
        lines = (each for each in self._lines() if each[0] not in journal)
        for window in windows(lines, WINDOW):
            found = [self._reread(number, data) for number, data in window]
            yield from (each for each in found if isinstance(each, Result))
            yield from sorted((each for each in found if isinstance(each, Line)), key=beginning)

    def _reread(self, number: int, data: bytes) -> Line | Result:
        try:
            return self._line(number, data)
        except TurnoutError as error:
            return unread(number, request_id_of(self.record.id, number), id_in(data), error)

    async def _work(self, left: ReadAhead[Line | Result], journal: Journal) -> None:
        """One of those that answer lines, one after the other."""
        while (line := await left.next()) is not None:
            result = await self._answer(line) if isinstance(line, Line) else line
            with named(KEPT):
                journal.append(result)
            if result.spent is not None:
                self.record.usage.add(result.spent)

    async def _answer(self, line: Line) -> Result:
        record = self.record
        request_id = request_id_of(record.id, line.number)

        async def ask() -> Result:
            async with self._room:
                if self._service.callers.owner(record.tenant) != record.owner:
                    raise TurnoutError(Code.UNAUTHENTICATED, f"tenant {record.tenant!r} is another one by now")
                seed = seed_of(record.seed, line.number)
                self._num_asked += 1
                try:
                    return await answer_line(self._service, line, request_id, self._attributed, seed, self._caller)
                finally:
                    self._num_asked -= 1

        try:
            return await retried(ask, _passing(line))
        except TurnoutError as error:
            return failed(line, request_id, error)

    @property
    def _caller(self) -> Caller:
        record = self.record
        limits = self._service.callers.limits(record.tenant)
        return Caller(record.tenant, limits, record.key_id, "batch", record.entry)

    def _attributed(self, call: C) -> C:
        record = self.record
        # What does not end in time is not begun anew: a call may take as long as the whole batch.
        left_s = max(record.expires_at - time.time(), 1.0)
        deadline_s = left_s if call.deadline_s is None else min(call.deadline_s, left_s)
        return replace(self._caller.attributed(call), batch_id=record.id, deadline_s=deadline_s)

    def _keep(self, journal: Journal) -> None:
        with named(KEPT):
            journal.sync()
        self._count(journal)
        self._store.save_batch(self.record)

    def _count(self, journal: Journal) -> None:
        total, answered = self.record.request_counts.total, journal.num_answered
        self.record.request_counts = Counts(total=total, completed=answered, failed=len(journal) - answered)

    def _finish(self, journal: Journal) -> None:
        """End a batch; what has no answer is named, where its time is over."""
        status: Status = "cancelled"
        if self.record.status == "finalizing":
            for line in self._left(journal):
                result = self._expired(line) if isinstance(line, Line) else line
                with named(KEPT):
                    journal.append(result)
            status = "expired" if _has_expired(journal) else "completed"
        self._end(journal, status)

    def _expired(self, line: Line) -> Result:
        message = f"line {line.number}: was not answered within {self.record.completion_window}"
        return not_asked(line, request_id_of(self.record.id, line.number), EXPIRED, message)

    def _end(self, journal: Journal, status: Status) -> None:
        """Write the files of answers and errors; nothing more will happen to it."""
        record, folder = self.record, self._store.work_folder(self.record)
        with named(KEPT):
            journal.sync()
            record.output_file_id = self._export(journal, folder / "output", answered=True)
            record.error_file_id = self._export(journal, folder / "errors", answered=False)
        self._count(journal)
        self._turn(status)

    def _export(self, journal: Journal, path: Path, answered: bool) -> str | None:
        record = self.record
        if not journal.export(path, answered):
            return None
        kind = "output" if answered else "error"
        # Written a second time after a crash, it is the same file.
        file_id = f"file-{hashlib.blake2b(f'{record.id}/{kind}'.encode(), digest_size=12).hexdigest()}"
        with path.open("rb") as file:
            pieces = iter(partial(file.read, 1 << 20), b"")
            name = f"{record.id}_{kind}.jsonl"
            return self._store.add_file(record.owner, name, "batch_output", pieces, file_id).id

    def _turn(self, status: Status) -> None:
        """Enter the next state, and keep it."""
        self.record.status = status
        setattr(self.record, f"{status}_at", int(time.time()))
        self._store.save_batch(self.record)


def _passing(line: Line) -> dict[Code, float]:
    """After what a line is asked again, and for how many seconds."""
    codes = PASSING if line.body.get("deadline_s") is None else set(PASSING) - {Code.DEADLINE_EXCEEDED}
    return dict.fromkeys(codes, math.inf)


def _has_expired(journal: Journal) -> bool:
    """Whether a line was not answered in time, by what is kept of it: the end may be begun again after that."""
    return any((record["error"] or {}).get("code") == EXPIRED for _, record in journal.entries(answered=False))


def _used(journal: Journal) -> BatchUsage:
    """What the answers that a journal holds used."""
    used = BatchUsage()
    for _, record in journal.entries(answered=True):
        used.add(Spent.of_record(record))
    return used


async def _opened(path: Path) -> Journal:
    """A journal, locked; who is cancelled meanwhile leaves it closed."""
    opened = list[Journal]()
    try:
        with named(KEPT):
            await finish_in_thread(lambda: opened.append(Journal(path)))
    except asyncio.CancelledError:
        for journal in opened:
            journal.close()
        raise
    return opened[0]


P = ParamSpec("P")
T = TypeVar("T")


async def finish_in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As `asyncio.to_thread`, but a caller that is cancelled meanwhile is cancelled only when the thread has ended.

    A thread cannot be stopped: what it writes to must not be closed, or opened again, before it has ended.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        raise
