"""What a caller is told where a disk does not do its part."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from turnout.errors import Code, TurnoutError

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
    except FileNotFoundError:
        raise TurnoutError(Code.INVALID_ARGUMENT, f"{what}: there is no such file") from None
    except OSError as error:
        reason = "the disk is full" if error.errno in FULL else error.strerror or type(error).__name__
        raise TurnoutError(Code.UNAVAILABLE, f"{what}: {reason}") from None
