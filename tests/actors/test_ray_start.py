"""A Ray that does not start at once is started again, and nothing of the failed start stays."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from actors.ray_start import TRIES, try_to_start
from tests.actors.hosts import poll
from turnout.errors import Code, TurnoutError

WAITS = "import sys; print('up', flush=True); sys.stdin.read()"
WITH_ONE = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {WAITS!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


def begin(program: str, *arguments: str) -> subprocess.Popen[str]:
    """Its first line has not been read."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_what_a_failed_start_left_is_ended_and_nothing_else(tmp_path: Path) -> None:
    folder, begun = str(tmp_path / "ray"), list[subprocess.Popen[str]]()
    grandchildren = list[int]()
    before = begin(WAITS, folder)

    def start() -> str:
        if begun:
            return "started"
        begun.extend([begin(WITH_ONE, f"--temp-dir={folder}/session"), begin(WAITS)])
        grandchildren.append(int(begun[0].stdout.readline()))
        raise RuntimeError("the node timed out")

    try:
        assert try_to_start(start, folder) == "started"
        failed, other = begun
        assert failed.wait(30) == -signal.SIGKILL
        await poll(lambda: not runs(grandchildren[0]), "an end of what the failed start's process has started")
        assert (other.poll(), before.poll()) == (None, None)
    finally:
        for process in (before, *begun):
            process.kill()
            process.communicate()


def test_what_has_failed_every_time_is_told_with_its_last_reason(tmp_path: Path) -> None:
    tries = list[int]()

    def start() -> None:
        tries.append(len(tries) + 1)
        raise RuntimeError(f"try {tries[-1]}")

    with pytest.raises(
        TurnoutError, match=f"^Ray has not started on this machine in {TRIES} tries: try {TRIES}$"
    ) as no:
        try_to_start(start, str(tmp_path))
    assert no.value.code is Code.UNAVAILABLE
    assert tries == list(range(1, TRIES + 1))
