"""Sums of usage records by day and tenant, next to each file of records: a process that starts reads sums only.

`usage-NAME.sums.json` says what the records in the first bytes of `usage-NAME.jsonl` add up to. It is written when the
file is full or its process ends, and by a process that had to read records; it may be missing, and what comes after
its bytes is read record by record.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deployments.access.usage_record import UsageRecord
from turnout.atomic_files import write_whole

log = logging.getLogger("ray.serve")

Amounts = tuple[float, float, float]  # tokens read and written, FLOPs, seconds of answering
NOTHING: Amounts = (0.0, 0.0, 0.0)


def day_of(time: datetime) -> str:
    """The day that a time lies in, by UTC."""
    return f"{time.astimezone(UTC):%Y-%m-%d}"


class Days:
    """Sums by day and tenant.

    Attributes:
        sums: the amounts; they are replaced, never changed.
    """

    def __init__(self) -> None:
        self.sums: dict[str, dict[str, Amounts]] = {}

    def add(self, record: UsageRecord) -> None:
        """Count a record, on the day on which it ended."""
        tokens = float(record.prompt_tokens + record.completion_tokens)
        self._add(day_of(record.time), record.tenant, (tokens, record.cost.flops, record.cost.wall_s))

    def take(self, days: Mapping[str, Mapping[str, Amounts]]) -> None:
        """Count other sums."""
        for day, tenants in days.items():
            for tenant, amounts in tenants.items():
                self._add(day, tenant, amounts)

    def _add(self, day: str, tenant: str, amounts: Amounts) -> None:
        tenants = self.sums.setdefault(day, {})
        known = tenants.get(tenant, NOTHING)
        tenants[tenant] = (known[0] + amounts[0], known[1] + amounts[1], known[2] + amounts[2])


class FileSums(BaseModel):
    """What the records in the first `num_bytes` of a file add up to, by day and tenant."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    num_bytes: Annotated[int, Field(ge=0)] = 0
    days: dict[str, dict[str, Amounts]] = {}


def sums_path(records: Path) -> Path:
    """Where the sums of a file of records are."""
    return records.with_suffix(".sums.json")


def write_sums(records: Path, sums: FileSums) -> None:
    """Keep the sums of a file of records; where that fails, readers read the records."""
    path = sums_path(records)
    try:
        write_whole(path, sums.model_dump_json().encode())
    except OSError as error:
        log.warning("%s: sums of usage cannot be written (%s)", path, error.strerror)


def read_sums(records: Path) -> FileSums:
    """The sums of a file of records; nothing, where there are none, or none that fit it."""
    try:
        sums = FileSums.model_validate_json(sums_path(records).read_bytes())
        return sums if sums.num_bytes <= records.stat().st_size else FileSums()
    except (OSError, ValidationError):
        return FileSums()


class FolderSums:
    """Adds up what all processes but this one record in a folder.

    Args:
        folder: where they write.
        own: tells a file of this process's own, which is left out.
    """

    def __init__(self, folder: Path, own: Callable[[Path], bool]) -> None:
        self._folder = folder
        self._own = own
        self._read: dict[Path, int] = {}  # bytes, by file
        self._faulty: set[Path] = set()

    def since(self, start: datetime) -> Days:
        """What has been recorded since the last look, in files that were written to at `start` or later."""
        found = Days()
        for path in sorted(self._folder.glob("usage-*.jsonl")):
            if self._own(path):
                continue
            try:
                self._look(path, start, found)
            except OSError as error:
                if path not in self._faulty:
                    log.warning("%s: what was used cannot be read (%s); budgets go on without", path, error.strerror)
                self._faulty.add(path)
        return found

    def _look(self, path: Path, start: datetime, found: Days) -> None:
        state, done = path.stat(), self._read.get(path)
        # A file that was last written before has nothing later in it.
        if state.st_mtime < start.timestamp() - 1 or state.st_size == done:
            return
        if done is None:
            sums = self._first(path)
            found.take(sums.days)
            self._read[path] = sums.num_bytes
        else:
            self._read[path] = _read_on(path, done, found)

    def _first(self, path: Path) -> FileSums:
        """All of a file; the next one who starts finds its sums."""
        known, days = read_sums(path), Days()
        days.take(known.days)
        end = _read_on(path, known.num_bytes, days)
        sums = FileSums(num_bytes=end, days=days.sums)
        if end > known.num_bytes:
            write_sums(path, sums)
        return sums


def _read_on(path: Path, start: int, days: Days) -> int:
    """Add up the records after an offset in bytes, but for lines that are none; where the last whole line ends."""
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                break  # it is being written
            start += len(line)
            try:
                days.add(UsageRecord.model_validate_json(line))
            except ValidationError:
                continue
    return start
