"""Files and batches on disk: a folder per tenant, a file per record, each written whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ValidationError

from deployments.batches.disk import named
from deployments.batches.records import BatchRecord, FileRecord
from turnout.atomic_files import whole, write_whole
from turnout.batches_config import BatchesConfig
from turnout.errors import Code, TurnoutError, invalid

KEPT = "the folder of batches"
IDS = re.compile(r"(file-|batch_)[0-9a-f]{24}")
LEFT_OVER_S = 86400.0  # no upload takes longer
Record = TypeVar("Record", FileRecord, BatchRecord)
Kind = Literal["files", "batches"]
_LOGGED: set[Path] = set()  # records that were logged as unknown: they are looked at several times a second

log = logging.getLogger("ray.serve")


class BatchStore:
    """What tenants have uploaded and asked for. Every method blocks, and raises TurnoutError where the disk fails.

    An `owner` is a tenant as `Caller.owner` names it.

    Args:
        config: where it is, and its limits.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the folder cannot be made.
    """

    def __init__(self, config: BatchesConfig) -> None:
        self.config = config
        self._root, self._adding = _made(config.folder), threading.Lock()
        self._ended: set[Path] = set()  # records that have been found to have ended: they do not change any more

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """Whether this process is the one that works on the batches, for as long as the context lasts.

        The system takes the lock back when the process ends, however it ends.
        """
        with named(KEPT):
            handle = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(handle)

    def add_file(
        self,
        owner: str,
        filename: str,
        purpose: Literal["batch", "batch_output"],
        data: Iterable[bytes],
        file_id: str | None = None,
    ) -> FileRecord:
        """Keep a file.

        Raises:
            TurnoutError: INVALID_ARGUMENT: it is too large, or empty; RESOURCE_EXHAUSTED: the tenant keeps too much.
        """
        folder = self._folder(owner, "files")
        if purpose == "batch":
            self.check_room(owner)
        file_id = file_id or f"file-{secrets.token_hex(12)}"
        size, most = 0, self.config.max_file_bytes
        with named(KEPT), whole(folder / f"{file_id}.data") as part:
            with part.open("wb") as out:
                for piece in data:
                    size += len(piece)
                    if purpose == "batch" and size > most:
                        raise invalid("file", f"must have at most {most} bytes")
                    out.write(piece)
            if not size:
                raise invalid("file", "must not be empty")
            if purpose == "batch":
                self._check_kept(folder)  # others of the tenant's may have come at the same time
        record = FileRecord(
            id=file_id,
            owner=owner,
            bytes=size,
            created_at=int(time.time()),
            filename=filename[:255],
            purpose=purpose,
        )
        _save(folder / f"{file_id}.json", record)
        return record

    def check_room(self, owner: str) -> None:
        """Refuse a file that there could be no room for, however small it is.

        Raises:
            TurnoutError: RESOURCE_EXHAUSTED: the tenant keeps too much.
        """
        self._check_kept(self._folder(owner, "files"), coming=1)

    def file(self, owner: str, file_id: str) -> FileRecord:
        """A file of the tenant's.

        Raises:
            TurnoutError: NOT_FOUND, also where it is another tenant's.
        """
        return self._record(owner, "files", file_id, FileRecord)

    def files(self, owner: str) -> list[FileRecord]:
        """The tenant's files, the newest first."""
        return _records(self._folder(owner, "files"), FileRecord)

    def content(self, owner: str, file_id: str) -> Path:
        """Where a file of the tenant's lies.

        Raises:
            TurnoutError: NOT_FOUND.
        """
        self.file(owner, file_id)
        return self._folder(owner, "files") / f"{file_id}.data"

    def delete_file(self, owner: str, file_id: str) -> None:
        """Forget a file.

        Raises:
            TurnoutError: NOT_FOUND; INVALID_ARGUMENT: a batch still reads it.
        """
        self.file(owner, file_id)
        for batch in self.batches(owner):
            if batch.input_file_id == file_id and not batch.ended:
                raise invalid("file_id", f"is being read by {batch.id}; cancel that first")
        _remove_file(self._folder(owner, "files"), file_id)

    def add_batch(self, record: BatchRecord) -> None:
        """Keep a new batch; the runner finds it. Of those that have ended, too old ones are forgotten.

        Raises:
            TurnoutError: RESOURCE_EXHAUSTED: too many of the tenant's have not ended, or its files take too much.
        """
        with self._adding:
            kept = self.batches(record.owner)
            ended = [each for each in kept if each.ended]
            if len(kept) - len(ended) >= self.config.max_batches:
                message = f"batches: {self.config.max_batches} have not ended yet; wait for one, or cancel some"
                raise TurnoutError(Code.RESOURCE_EXHAUSTED, message, "batches")
            self._check_bytes(sum(_kept(self._folder(record.owner, "files"))) + 1)  # it is to write some
            with named(KEPT):
                for each in ended[self.config.max_ended :]:
                    self._forget_batch(each)
                self.work_folder(record).mkdir(mode=0o700)
            self.save_batch(record)

    def save_batch(self, record: BatchRecord) -> None:
        """Keep what has become of a batch."""
        _save(self._folder(record.owner, "batches") / f"{record.id}.json", record)

    def delete_batch(self, record: BatchRecord) -> None:
        """Forget a batch that has ended, its file and those of its answers.

        Raises:
            TurnoutError: INVALID_ARGUMENT: it has not ended.
        """
        if not record.ended:
            raise invalid("batch_id", f"{record.id} has not ended; cancel it first")
        folder = self._folder(record.owner, "files")
        for file_id in (record.input_file_id, record.output_file_id, record.error_file_id):
            if file_id is not None:
                _remove_file(folder, file_id)
        with named(KEPT):
            self._forget_batch(record)

    def batch(self, owner: str, batch_id: str) -> BatchRecord:
        """A batch of the tenant's.

        Raises:
            TurnoutError: NOT_FOUND, also where it is another tenant's.
        """
        record = self._record(owner, "batches", batch_id, BatchRecord)
        if self.is_cancelled(record) and record.status in ("validating", "in_progress"):
            record.status = "cancelling"
        return record

    def batches(self, owner: str) -> list[BatchRecord]:
        """The tenant's batches, the newest first."""
        return _records(self._folder(owner, "batches"), BatchRecord)

    def unfinished(self) -> list[BatchRecord]:
        """Batches of all tenants that have not ended, the oldest first; UNAVAILABLE where they cannot be listed."""
        with named(KEPT):
            paths, found = set(self._root.glob("*/batches/*.json")), list[BatchRecord]()
        self._ended &= paths
        for path in paths - self._ended:
            record = _readable(path)
            if record is not None and record.ended:
                self._ended.add(path)
            elif record is not None:
                found.append(record)
        return sorted(found, key=lambda each: (each.created_at, each.id))

    def cancel(self, record: BatchRecord) -> None:
        """Leave word that a batch is to end; the runner looks for it."""
        with named(KEPT):
            (self.work_folder(record) / "cancel").touch()

    def is_cancelled(self, record: BatchRecord) -> bool:
        """Whether such word has been left."""
        return (self.work_folder(record) / "cancel").exists()

    def work_folder(self, record: BatchRecord) -> Path:
        """Where the work on a batch is kept until it ends."""
        return self._folder(record.owner, "batches") / f"{record.id}.work"

    def sweep(self, now: float) -> None:
        """Forget what is older than its retention, and the work of batches that have ended.

        What cannot be looked at just now is left, and looked at again the next time.

        Raises:
            TurnoutError: UNAVAILABLE: the folder of all cannot be listed.
        """
        with named(KEPT):
            tenants = list(self._root.iterdir())
        for tenant in tenants:
            try:
                with named(str(tenant)):
                    if tenant.is_dir():
                        _sweep(tenant, now, self.config.retention_s)
            except TurnoutError as error:
                log.error("%s: what is too old is not forgotten: %s", tenant, error)

    def _forget_batch(self, record: BatchRecord) -> None:
        shutil.rmtree(self.work_folder(record), ignore_errors=True)
        (self._folder(record.owner, "batches") / f"{record.id}.json").unlink(missing_ok=True)

    def _check_kept(self, folder: Path, coming: int = 0) -> None:
        """Whether a tenant may keep the files of its folder, and a number of further files of a byte each."""
        kept = _kept(folder)
        if len(kept) + coming > self.config.max_files:
            message = f"file: {self.config.max_files} files are kept already; delete some"
            raise TurnoutError(Code.RESOURCE_EXHAUSTED, message, "file")
        self._check_bytes(sum(kept) + coming)

    def _check_bytes(self, wanted: int) -> None:
        if wanted > self.config.max_bytes:
            message = f"file: of {self.config.max_bytes} bytes that may be kept, answers included, too few are left"
            raise TurnoutError(Code.RESOURCE_EXHAUSTED, f"{message}; delete some files", "file")

    def _folder(self, owner: str, kind: Kind) -> Path:
        # A tenant's name may be anything, and must not lead out of the folder.
        folder = self._root / hashlib.sha256(owner.encode()).hexdigest()[:32] / kind
        with named(KEPT):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder

    def _record(self, owner: str, kind: Kind, name: str, form: type[Record]) -> Record:
        path = self._folder(owner, kind) / f"{name}.json"
        with named(KEPT):
            record = _read(path, form) if IDS.fullmatch(name) else None
        if record is None or record.owner != owner:
            field = "file_id" if kind == "files" else "batch_id"
            raise TurnoutError(Code.NOT_FOUND, f"{field}: there is no {name[:100]!r}", field)
        return record


def _made(name: str) -> Path:
    folder = Path(name).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise invalid("batches.folder", f"cannot write {name}: {error.strerror}") from None
    return folder


def _sweep(tenant: Path, now: float, retention_s: float) -> None:
    """Forget what is too old of one tenant's folder."""
    oldest = now - retention_s
    batches = _records(tenant / "batches", BatchRecord)
    # A batch that another version wrote may still read any file.
    known = len(batches) == len(list((tenant / "batches").glob("*.json")))
    for batch in [each for each in batches if each.ended]:
        shutil.rmtree(tenant / "batches" / f"{batch.id}.work", ignore_errors=True)
        if batch.created_at < oldest:
            (tenant / "batches" / f"{batch.id}.json").unlink(missing_ok=True)
    read = {each.input_file_id for each in batches if not each.ended}
    for file in _records(tenant / "files", FileRecord):
        if known and file.created_at < oldest and file.id not in read:
            _remove_file(tenant / "files", file.id)
    for path in (tenant / "files").glob("*"):
        # What a process that ended in an upload left: half a file, or one without its record.
        half = path.name.startswith(".") or not path.with_suffix(".json").exists()
        with suppress(FileNotFoundError):  # an upload has ended meanwhile, or a file was deleted
            if half and path.stat().st_mtime < now - LEFT_OVER_S:
                path.unlink()


def _records(folder: Path, form: type[Record]) -> list[Record]:
    """All of a folder, the newest first."""
    with named(KEPT):
        found = [record for path in folder.glob("*.json") if (record := _read(path, form)) is not None]
    return sorted(found, key=lambda each: (-each.created_at, each.id))


def _save(path: Path, record: BaseModel) -> None:
    with named(KEPT):
        write_whole(path, record.model_dump_json().encode())


def _remove_file(folder: Path, file_id: str) -> None:
    with named(KEPT):
        (folder / f"{file_id}.json").unlink(missing_ok=True)
        (folder / f"{file_id}.data").unlink(missing_ok=True)


def _kept(folder: Path) -> list[int]:
    """Bytes of each file that a tenant keeps, and of those that are just being written."""
    found = []
    for path in folder.iterdir():
        if ".data" in path.name:
            with suppress(FileNotFoundError):  # deleted meanwhile
                found.append(path.stat().st_size)
    return found


def _readable(path: Path) -> BatchRecord | None:
    """A record; None also where it cannot be read just now: it is looked at again soon."""
    try:
        return _read(path, BatchRecord)
    except OSError as error:
        log.error("%s cannot be read just now: %s", path, error)
        return None


def _read(path: Path, form: type[Record]) -> Record | None:
    """A record; None where it is gone, or is none that this version knows.

    Raises:
        OSError: it is there and cannot be read.
    """
    try:
        return form.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        if path not in _LOGGED:
            _LOGGED.add(path)
            log.error("%s is left as it is, this version cannot read it: %s", path, error.errors()[0]["msg"])
        return None
