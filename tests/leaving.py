"""How a process of tests that has used Ray ends: with the tests' own exit status, whatever C++ does after Python."""

from __future__ import annotations

import atexit
import os
import sys

import pytest

_ended: list[pytest.Session] = []


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remember whose exit status is this process's."""
    _ended.append(session)


@atexit.register  # what is registered first is called last: this is imported before Ray is
def _leave() -> None:
    """End this process before the destructors of C++ run, if Ray is in it.

    Threads of Ray and of gRPC go on when both are shut down, and may use what the destructors take from them: a run
    whose tests had all passed has ended as a segmentation fault. Ray ends its workers in this way as well.
    """
    if _ended and "ray" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(_ended[-1].exitstatus))
