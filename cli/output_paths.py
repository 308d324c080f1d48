"""Output paths of commands: unusable ones are refused before the work, and named when writing fails."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from turnout.errors import invalid


def check_out(path: Path, field: str = "out") -> None:
    """Refuse a file that cannot be written, before hours of work for it.

    Args:
        path: the file.
        field: the option that named it.

    Raises:
        TurnoutError: INVALID_ARGUMENT: it is a folder, or none can be made or written in where it is to be.
    """
    if path.is_dir():
        raise invalid(field, f"{path} is a folder; give a file")
    _check_within(path, path.absolute().parents, field)


def check_folder(path: Path) -> None:
    """Refuse a folder that cannot be made, or written in.

    Raises:
        TurnoutError: INVALID_ARGUMENT.
    """
    _check_within(path, (path.absolute(), *path.absolute().parents))


def _check_within(path: Path, folders: Iterable[Path], field: str = "out") -> None:
    there = next(folder for folder in folders if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise invalid(field, f"cannot write {path}: {there} is no folder that can be written in")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what goes wrong with a file while it is written, as on a full disk, into a refusal.

    Raises:
        TurnoutError: INVALID_ARGUMENT: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise invalid("out", f"cannot write {path}: {error.strerror or error}") from None
