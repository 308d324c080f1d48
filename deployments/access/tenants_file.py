"""The tenants file: tenants, their limits and the hashes of their keys, as YAML.

YAML and not a database: an operator can read, review and mount it, a rename replaces it whole on every file system a
cluster shares, and a few thousand tenants are little. A writer holds the lock file next to it; a reader
needs none, for it is only ever replaced as a whole.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal

import yaml
from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, model_validator

from deployments.access.keys import KeyRecord
from turnout.access_config import TenantLimits, TenantName
from turnout.config import read_yaml
from turnout.errors import Code, TurnoutError, invalid, not_found
from turnout.registry import validated

MODE = 0o600
LOCK_TIMEOUT_S = 10.0
HEAD = "# Written by `turnout tenants`. Keys are not in it: only their salted hashes.\n"


class Tenant(BaseModel):
    """One tenant, as the file has it.

    Attributes:
        id: distinguishes it from earlier and later tenants of its name; "" where the entry has none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")] = ""
    limits: TenantLimits = TenantLimits()
    keys: Annotated[tuple[KeyRecord, ...], Field(max_length=1000)] = ()
    disabled: bool = False
    note: Annotated[str, Field(max_length=500)] = ""

    def key(self, key_id: str) -> KeyRecord:
        """One of its keys.

        Raises:
            TurnoutError: NOT_FOUND.
        """
        for record in self.keys:
            if record.id == key_id:
                return record
        raise not_found("key", key_id, [record.id for record in self.keys])

    def with_key(self, record: KeyRecord) -> Tenant:
        """The same with a key added, or replaced by its id."""
        others = tuple(each for each in self.keys if each.id != record.id)
        return self.model_copy(update={"keys": (*others, record)})


class Tenants(BaseModel):
    """The whole file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    tenants: dict[TenantName, Tenant] = {}

    @model_validator(mode="after")
    def _check_ids(self) -> Tenants:
        seen: dict[str, str] = {}
        for name, tenant in self.tenants.items():
            for record in tenant.keys:
                if record.id in seen:
                    raise invalid(f"tenants.{name}.keys", f"key {record.id} is there twice (also of {seen[record.id]})")
                seen[record.id] = name
        return self

    def tenant(self, name: str) -> Tenant:
        """One tenant.

        Raises:
            TurnoutError: NOT_FOUND.
        """
        if name not in self.tenants:
            raise not_found("tenant", name[:100], list(self.tenants))
        return self.tenants[name]

    def holding(self, name: str, tenant: Tenant) -> Tenants:
        """The same with a tenant added or replaced."""
        return Tenants(tenants={**self.tenants, name: tenant})

    def without(self, name: str) -> Tenants:
        """The same without a tenant.

        Raises:
            TurnoutError: NOT_FOUND.
        """
        self.tenant(name)
        return Tenants(tenants={other: tenant for other, tenant in self.tenants.items() if other != name})


def new_entry() -> str:
    """The id of a tenant that is added."""
    return secrets.token_hex(8)


def unrecorded(name: str, tenant: Tenant) -> TurnoutError | None:
    """Why a tenant can do nothing where no usage is recorded; None: it can."""
    if tenant.limits.budget is None:
        return None
    field = f"tenants.{name}.limits.budget"
    return invalid(field, "needs access.usage in the configuration: what is spent is read from the records")


def read_tenants(path: Path) -> Tenants:
    """The file's tenants.

    Raises:
        TurnoutError: it cannot be read, or something in it is not allowed; never shows what is in it.
    """
    try:
        return validated(Tenants, read_yaml(path), "")
    except TurnoutError as error:
        raise TurnoutError(error.code, f"{path}: {_without_value(error.message)}", "access.tenants_file") from None


def _without_value(message: str) -> str:
    """A value that is not allowed may be a piece of a hash, or a key that was put there by mistake."""
    return message.partition(" (got ")[0]


def write_tenants(path: Path, tenants: Tenants) -> None:
    """Replace the file at once, and lastingly; it keeps its owner and mode. The caller holds the lock.

    Raises:
        TurnoutError: UNAVAILABLE: it cannot be written, or not as its owner's; the old one is as it was.
    """
    path = path.resolve()
    values = tenants.model_dump(mode="json", exclude_defaults=True) | {"version": tenants.version}
    text = HEAD + yaml.dump(values, Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True)
    try:
        number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise _unwritten(path, error) from None
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            old = path.stat() if path.exists() else None
            os.fchmod(file.fileno(), old.st_mode & 0o777 if old is not None else MODE)
            if old is not None:
                _own_as(Path(name), old)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            Path(name).unlink()
        raise _unwritten(path, error) from None


def _own_as(made: Path, old: os.stat_result) -> None:
    """Root may change the file of the server's user: what it makes is that user's, who could not read it otherwise."""
    state = made.stat()
    if (state.st_uid, state.st_gid) != (old.st_uid, old.st_gid):
        os.chown(made, old.st_uid, old.st_gid)


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock the file against other writers on this machine.

    Raises:
        TurnoutError: UNAVAILABLE: another process has held the lock for too long, or it cannot be made.
    """
    path = path.resolve()
    lock_path = path.with_name(f"{path.name}.lock")
    lock = FileLock(lock_path, timeout=LOCK_TIMEOUT_S, mode=MODE)
    try:
        lock.acquire()
        if path.exists():
            _own_as(lock_path, path.stat())
    except Timeout:
        message = f"{path}: another process has been changing it for {LOCK_TIMEOUT_S:g} s"
        raise TurnoutError(Code.UNAVAILABLE, message) from None
    except OSError as error:
        lock.release()
        raise _unwritten(path, error) from None
    try:
        yield
    finally:
        lock.release()


def _unwritten(path: Path, error: OSError) -> TurnoutError:
    return TurnoutError(Code.UNAVAILABLE, f"{path}: cannot be written: {error.strerror or error}")
