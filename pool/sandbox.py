"""Untrusted Python: a process of its own with little of everything, ended when its time is up."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pool import sandboxed
from pool.process_tree import proportional_bytes, tree
from turnout.errors import Code, TurnoutError

Outcome = Literal["passed", "failed", "timeout", "killed"]
# What there may be a wall against, and the walls that keep it out; against pathname sockets no kernel has one yet.
THREATS = {
    "network": {"network"},
    "TCP": {"network", "tcp"},
    "processes of others": {"processes", "signals"},
    "writing files": {"writes"},
    "reading files": {"reads"},
    "Unix sockets by path": set[str](),
}
LOOK_S = 0.2  # between looks at what all processes and files take together, for which the kernel has no limit
ENDING_S = 10.0  # for a process to end after its last word
BLOCK = 4096  # bytes that a name in a folder costs at least
MOST_SAID = 64 << 10  # bytes of its output that are read; its last line is shorter
SHOWN = 200
UNSEEN = (errno.ENAMETOOLONG, errno.EACCES)  # of folders, in which a program could hide what it stores


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a program.

    Attributes:
        timeout_s: time on the clock, seconds.
        cpu_s: processor time, seconds.
        memory_bytes: address space of each process, and memory of all of them together.
        file_bytes: largest file it writes.
        folder_bytes: all its files together, each counted as a block at least.
        processes: processes and threads in addition to the first.
    """

    timeout_s: float = 10.0
    cpu_s: int = 5
    memory_bytes: int = 512 << 20
    file_bytes: int = 1 << 20
    folder_bytes: int = 64 << 20
    processes: int = 8


@dataclass(frozen=True, slots=True)
class Ended:
    """End of a program.

    Attributes:
        outcome: passed, it ran to its last line; failed, it raised or left early; timeout; killed, by a limit.
        reason: for people; empty where it passed.
        walls: what the kernel kept it from, in addition to the limits: network, processes, writes, reads, tcp, signals.
        result: plain data that it left as its global `RESULT`; None without, and where it did not pass.
    """

    outcome: Outcome
    reason: str
    walls: tuple[str, ...] = ()
    result: Any = None


async def run_python(program: str, limits: Limits, given: Any = None, walls: Sequence[str] = ()) -> Ended:
    """Run a program to its end, in an empty folder that is deleted afterwards.

    It has the standard library, no environment, no standard input, and as far as the kernel lets us no network,
    nothing to write to except its folder, and nothing to read except that and what Python itself needs; as root it
    becomes the user `nobody` first. All it started ends with it; without a namespace of processes (`Ended.walls`), all
    but processes that have left its session and whose parent has ended. It ends with this process, too.

    Args:
        program: Python source.
        limits: what it may use.
        given: plain data, its global `GIVEN`.
        walls: without which it does not run, see `Ended.walls`.

    Raises:
        TurnoutError: UNAVAILABLE: the sandbox cannot be built here, or a wall; says nothing of the program.
    """
    done = secrets.token_hex(16)
    task = {"program": program, "limits": asdict(limits), "done": done, "given": given, "walls": walls}
    async with _own_folder() as folder:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-I", "-S", "-B", str(sandboxed.__file__)),
            cwd=folder,
            env={},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        watch = asyncio.create_task(_watch(process, folder, limits))
        late = f"not done after {limits.timeout_s:g} s"
        try:
            said = await asyncio.wait_for(_talk(process, json.dumps(task).encode(), done.encode()), limits.timeout_s)
            if len(said) > MOST_SAID:
                return Ended("killed", f"wrote more than {MOST_SAID} bytes past its standard output")
            late = "said its last word, and did not end"
            status = await asyncio.wait_for(process.wait(), ENDING_S)
        except TimeoutError:
            return Ended("timeout", late)
        finally:
            _kill(process)
            try:
                await _gone(process)
            finally:
                watch.cancel()
            [beyond] = await asyncio.gather(watch, return_exceptions=True)
    return Ended("killed", beyond) if isinstance(beyond, str) else _judged(said, status, done)


@asynccontextmanager
async def _own_folder() -> AsyncIterator[str]:
    folder = tempfile.mkdtemp(prefix="turnout-sandbox-")
    try:
        os.chmod(folder, 0o777)  # noqa: PTH101 - pathlib blocks no less, and is refused here
        yield folder
    finally:
        await asyncio.to_thread(_remove, folder)


def _remove(folder: str) -> None:
    """Remove a folder however deep it is; `shutil` keeps a file open for each level, and ends with a RecursionError."""
    for command in (("rm", "-rf"), ("chmod", "-R", "u+rwx"), ("rm", "-rf")):
        if os.path.lexists(folder):
            subprocess.run([*command, "--", folder], check=False, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill all of a program: its group, and its descendants, which may have left the group."""
    below = tree(process.pid)[1:] if process.returncode is None else []
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in below:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def _watch(process: asyncio.subprocess.Process, folder: str, limits: Limits) -> str:
    """End a program once all of it together takes too much; what it took."""
    while True:
        await asyncio.sleep(LOOK_S)
        if beyond := await asyncio.to_thread(_beyond, process.pid, folder, limits):
            _kill(process)
            return beyond


def _beyond(pid: int, folder: str, limits: Limits) -> str:
    if _stored_bytes(folder, limits.folder_bytes) > limits.folder_bytes:
        return f"its files take more than {limits.folder_bytes} bytes together"
    if proportional_bytes(tree(pid)) > limits.memory_bytes:
        return f"its processes take more than {limits.memory_bytes} bytes of memory together"
    return ""


def _stored_bytes(folder: str, most: int) -> int:
    """What lies below a folder; beyond `most` nothing more is counted, nor in a folder too deep or closed to us."""
    total, folders = 0, [folder]
    while folders and total <= most:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    total += BLOCK + entry.stat(follow_symlinks=False).st_size
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except OSError as error:  # it may be removed while we look
            if error.errno in UNSEEN:
                return most + 1
    return total


async def _talk(process: asyncio.subprocess.Process, task: bytes, done: bytes) -> bytes:
    """Hand the task over; what was said until the end, or the end of the line with the word, or it is too much."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(task)
        await process.stdin.drain()
    process.stdin.close()
    said = b""
    while len(said) <= MOST_SAID and b"\n" not in said.partition(done)[2]:
        if not (piece := await process.stdout.read(MOST_SAID)):
            break
        said += piece
    return said


async def _gone(process: asyncio.subprocess.Process) -> None:
    """Wait for the end; the rest of what was said is dropped, for a full pipe that is not read hides the end.

    Without a namespace of processes, one that has left may hold the pipe for longer: it is not waited for.
    """
    assert process.stdout is not None
    with suppress(TimeoutError):
        async with asyncio.timeout(ENDING_S):
            while await process.stdout.read(MOST_SAID):
                pass
            await process.wait()


def _judged(said: bytes, status: int, done: str) -> Ended:
    """The last line is the sandbox's own, by its word; a program that sets out to find the word in its process can."""
    last = said.rstrip().rpartition(b"\n")[2]
    try:
        found = json.loads(last)
    except (ValueError, RecursionError):  # a program may write to us
        found = None
    if isinstance(found, dict) and found.get("done") == done:
        if "fault" in found:
            raise TurnoutError(Code.UNAVAILABLE, f"the sandbox cannot run here: {found['fault']}")
        walls = tuple(str(wall) for wall in found["walls"])
        error = found.get("error")
        if error is None:
            return Ended("passed", "", walls, found.get("result"))
        return Ended("failed", str(error)[:SHOWN], walls)
    number = -status if status < 0 else status - 128
    if number in (signal.SIGXCPU, signal.SIGKILL):
        return Ended("killed", "used up its processor time or its memory")
    if number > 0:
        return Ended("killed", f"ended by signal {number}")
    return Ended("failed", "left before its last line")


async def walls_here() -> str:
    """What this machine's kernel keeps a program from in addition to the limits, and what it does not, for a report.

    Raises:
        TurnoutError: UNAVAILABLE: the sandbox cannot be built here.
    """
    walls = (await run_python("", Limits())).walls
    open_ = [what for what, against in THREATS.items() if not against & set(walls)]
    return f"walls: {', '.join(walls) or 'none'}; not walled: {', '.join(open_)}"
