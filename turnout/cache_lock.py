"""This program's folder in the user's cache, and locks between the processes that fill caches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs
from filelock import FileLock


def cache_folder() -> Path:
    """This program's folder in the user's cache."""
    return platformdirs.user_cache_path("turnout")


@contextmanager
def locked(name: str) -> Iterator[bool]:
    """Let one process of this machine at a time fetch a thing.

    Yields whether it is the only one. It may not be where the file system has no locks; and without a cache that can be
    written nothing can be fetched, and none is needed.

    Args:
        name: of the thing.
    """
    lock = FileLock(cache_folder() / "locks" / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.lock")
    try:
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, NotImplementedError):  # the latter where the file system has no locks
        yield False
        return
    try:
        yield True
    finally:
        lock.release()
