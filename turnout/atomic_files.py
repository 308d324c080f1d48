"""Files that are there whole or not at all, whatever is killed or loses its power meanwhile."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to; it is renamed to `path` once all of it is on disk, and removed where that fails.

    Two who write the same file at once write each their own, and the last one's is kept.

    Raises:
        OSError: as writing does.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield part
        sync(part)
        part.replace(path)
        sync(path.parent)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def write_whole(path: Path, data: bytes) -> None:
    """Write a file at once.

    Raises:
        OSError: as writing does; what was there before still is.
    """
    with whole(path) as part:
        part.write_bytes(data)


def sync(path: Path) -> None:
    """Wait until a file or a folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
