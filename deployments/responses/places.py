"""Places for encrypted responses that several ingress processes share: a folder, or the prefix store's Redis."""

from __future__ import annotations

import base64
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from deployments.batches.disk import named
from kvstore.base import ByteStore, StoreFault
from kvstore.keys import Keyring
from kvstore.tenants.quotas import Quotas
from turnout.atomic_files import write_whole
from turnout.errors import Code, TurnoutError, invalid
from turnout.responses_config import ResponsesConfig
from turnout.types import Namespace

LEAST_BYTES = 1024  # that a value counts with: so the limit in bytes bounds their number, too
CALL_S = 2.0  # for one call of Redis
RESCAN_S = 60.0
KEPT = "the responses"


class Place(Protocol):
    """Values by owner and name. Every method blocks, and raises TurnoutError (UNAVAILABLE) where the place fails.

    A value is forgotten some time after its last use, and the longest unused ones of an owner where they are too many.
    """

    def put(self, owner: str, name: str, value: bytes) -> None:
        """Keep a value; there is none of this name."""
        ...

    def get(self, owner: str, name: str) -> bytes | None:
        """Return a value, which counts as used now; None: there is none."""
        ...

    def delete(self, owner: str, name: str) -> bool:
        """Forget a value; whether there was one."""
        ...

    def sweep(self) -> None:
        """Forget what is too old, of all owners."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...


def namespace_of(owner: str) -> Namespace:
    """Return the namespace of an owner's responses; no tenant's name has `#`, so its prefixes have another one."""
    return Namespace("private", f"responses#{owner}")


class RedisPlace:
    """Values in Redis, in namespaces of their own with quotas of their own.

    Args:
        store: where they lie.
        keyring: names the namespaces.
        config: says how many, and for how long.
    """

    def __init__(self, store: ByteStore, keyring: Keyring, config: ResponsesConfig) -> None:
        self._store, self._keyring = store, keyring
        self._ttl_ms = int(1000 * config.retention_s)
        self._quotas = Quotas(store, keyring, lambda _: config.max_bytes, self._ttl_ms)

    def put(self, owner: str, name: str, value: bytes) -> None:
        """See `Place`."""
        key, deadline = self._key(owner, name), time.monotonic() + CALL_S
        with _reachable():
            self._store.write(key, [value], self._ttl_ms, deadline)
            self._quotas.record(namespace_of(owner), [(key, max(len(value), LEAST_BYTES))], [], deadline)

    def get(self, owner: str, name: str) -> bytes | None:
        """See `Place`."""
        key, deadline, room = self._key(owner, name), time.monotonic() + CALL_S, bytearray()

        def place(_: int, size: int) -> memoryview:
            room.extend(bytes(size))
            return memoryview(room)

        with _reachable():
            if not self._store.read([key], place, lambda _: True, self._ttl_ms, deadline):
                return None
            self._quotas.record(namespace_of(owner), [], [(key, max(len(room), LEAST_BYTES))], deadline)
        return bytes(room)

    def delete(self, owner: str, name: str) -> bool:
        """See `Place`."""
        key, deadline = self._key(owner, name), time.monotonic() + CALL_S
        with _reachable():
            found = self._store.delete([key], deadline) > 0
            self._quotas.forget(namespace_of(owner), [key], deadline)
        return found

    def sweep(self) -> None:
        """Do nothing: Redis forgets."""

    def close(self) -> None:
        """See `Place`."""
        self._store.close()

    def _key(self, owner: str, name: str) -> bytes:
        tag = base64.urlsafe_b64encode(self._keyring.namespace_id(namespace_of(owner))).rstrip(b"=")
        return b"to1:%s:response:%s" % (tag, name.encode())


@contextmanager
def _reachable() -> Iterator[None]:
    """Turn a fault of Redis into an error."""
    try:
        yield
    except StoreFault as fault:
        raise TurnoutError(Code.UNAVAILABLE, f"{KEPT}: their Redis does not answer ({fault.kind})") from None


class FolderPlace:
    """Values in a folder on disk: a folder for each owner, a file for each value, used when it was last touched.

    Args:
        folder: that all ingress processes see.
        config: says how many, and for how long.
        clock: seconds since 1970.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the folder cannot be made.
    """

    def __init__(self, folder: str, config: ResponsesConfig, clock: Callable[[], float] = time.time) -> None:
        self._root, self._config, self._clock = Path(folder).expanduser(), config, clock
        self._held: dict[Path, tuple[int, float]] = {}  # bytes of an owner's, and until when that is believed
        try:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise invalid("responses.folder", f"cannot write {folder}: {error.strerror}") from None

    def put(self, owner: str, name: str, value: bytes) -> None:
        """See `Place`."""
        folder, now = self._folder(owner), self._clock()
        with named(KEPT):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = folder / name
            write_whole(path, value)
            os.utime(path, (now, now))
            held, until = self._held.get(folder, (0, 0.0))
            held += max(len(value), LEAST_BYTES)
            if held > self._config.max_bytes or now > until:
                held, until = self._trimmed(folder, now), now + RESCAN_S
            self._held[folder] = (held, until)

    def get(self, owner: str, name: str) -> bytes | None:
        """See `Place`."""
        path, now = self._folder(owner) / name, self._clock()
        with named(KEPT):
            try:
                if path.stat().st_mtime < now - self._config.retention_s:
                    return None
                value = path.read_bytes()
                os.utime(path, (now, now))
            except FileNotFoundError:
                return None
        return value

    def delete(self, owner: str, name: str) -> bool:
        """See `Place`."""
        found = self.get(owner, name) is not None
        with named(KEPT):
            (self._folder(owner) / name).unlink(missing_ok=True)
        self._held.pop(self._folder(owner), None)
        return found

    def sweep(self) -> None:
        """See `Place`."""
        with named(KEPT):
            for folder in self._root.iterdir():
                if folder.is_dir():
                    self._trimmed(folder, self._clock())

    def close(self) -> None:
        """See `Place`."""

    def _trimmed(self, folder: Path, now: float) -> int:
        """Remove what is too old, and the longest unused where there is too much; bytes that are left."""
        found = []
        for path in folder.iterdir():
            with suppress(FileNotFoundError):  # deleted meanwhile
                stat = path.stat()
                found.append((stat.st_mtime, max(stat.st_size, LEAST_BYTES), path))
        held = sum(size for _, size, _ in found)
        for used, size, path in sorted(found):
            if used >= now - self._config.retention_s and held <= self._config.max_bytes:
                break
            path.unlink(missing_ok=True)
            held -= size
        return held

    def _folder(self, owner: str) -> Path:
        # A tenant's name may be anything, and must not lead out of the folder.
        return self._root / hashlib.sha256(owner.encode()).hexdigest()[:32]
