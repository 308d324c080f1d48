"""Errors of a disk, as callers see them."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec

from turnout.errors import Code, TurnoutError, invalid

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def named(what: str) -> Iterator[None]:
    """Turn the system's errors into ours.

    Args:
        what: what could not be read or written, as the caller knows it.

    Raises:
        TurnoutError: UNAVAILABLE, saying whether the disk is full; INVALID_ARGUMENT where there is no such file.
    """
    try:
        yield
    except sqlite3.OperationalError as error:
        reason = "the disk is full" if error.sqlite_errorcode == sqlite3.SQLITE_FULL else str(error)
        raise TurnoutError(Code.UNAVAILABLE, f"{what}: {reason}") from None
    except FileNotFoundError:
        raise TurnoutError(Code.INVALID_ARGUMENT, f"{what}: there is no such file") from None
    except OSError as error:
        reason = "the disk is full" if error.errno in FULL else error.strerror or type(error).__name__
        raise TurnoutError(Code.UNAVAILABLE, f"{what}: {reason}") from None


def located(field: str, path: str) -> tuple[Any, str]:
    """The file system of a path, or of a URL that fsspec knows, and the place in it.

    Args:
        field: what the caller calls it.
        path: where it is.

    Raises:
        TurnoutError: INVALID_ARGUMENT: there is no such scheme, or its package is not installed; names the field.
    """
    try:
        filesystem, place = fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise invalid(field, f"{path} cannot be used: {' '.join(str(error).split())}") from None
    return filesystem, place
