"""The inside of the sandbox: builds its walls, then runs the program. Started by path, with nothing but the stdlib.

What the kernel refuses is left out and said so: namespaces (network, processes) need a kernel that lets users make
them, the wall around files needs Landlock.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from typing import Any, NoReturn

NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
APART = NEW_IPC | NEW_PID | NEW_NET
NOBODY = 65534
MOST_RESULT = 32 << 10  # bytes of a result, as JSON
MOST_ERROR = 1000  # characters
KEPT_IN_KERNEL = ("shmmni", "msgmni")  # most segments of shared memory, and queues: no limit counts what is in them
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
WRITE_FILE, READ_FILE, READ_DIR = 1 << 1, 1 << 2, 1 << 3
WRITES = WRITE_FILE | sum(1 << bit for bit in range(4, 13))  # write, remove, make anything
READS = READ_FILE | READ_DIR
TRUNCATE, TRUNCATE_SINCE = 1 << 14, 3
BIND_AND_CONNECT, NET_SINCE = 3, 4
ABSTRACT_SOCKETS_AND_SIGNALS, SCOPES_SINCE = 3, 6
# Files of programs other than the interpreter's modules: shared libraries, and what the standard library looks up.
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo")
LOOKED_UP = ("/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types", "/dev/urandom", "/dev/random", "/dev/zero")

libc = ctypes.CDLL(None, use_errno=True)


def restrict_files(folder: str, library: list[int]) -> list[str]:
    """Where the kernel has Landlock: nothing is written outside the folder, nothing read but it and what Python needs.

    Args:
        folder: the program's own.
        library: descriptors of the folders modules come from, which may lie where the user `nobody` has no access.

    Returns:
        The walls that stand.
    """
    version = libc.syscall(LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return []
    writes = WRITES | (TRUNCATE if version >= TRUNCATE_SINCE else 0)
    walls = {"writes": 1, "reads": 1, "tcp": NET_SINCE, "signals": SCOPES_SINCE}
    fields = (writes | READS, BIND_AND_CONNECT, ABSTRACT_SOCKETS_AND_SIGNALS)
    known = fields[: 1 + (version >= NET_SINCE) + (version >= SCOPES_SINCE)]
    handled = struct.pack(f"{len(known)}Q", *known)
    rules = libc.syscall(LANDLOCK_CREATE, handled, len(handled), 0)
    if rules < 0:
        return []
    for place in library:
        allow(rules, place, READS)
    allowed = {folder: writes | READS, "/dev/null": READ_FILE | (writes & (WRITE_FILE | TRUNCATE))}
    allowed |= dict.fromkeys(LIBRARIES, READS) | dict.fromkeys(LOOKED_UP, READ_FILE)
    for path, what in allowed.items():
        if os.path.exists(path):  # noqa: PTH110 - pathlib is not worth its time
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allow(rules, place, what)
            os.close(place)
    restricted = libc.syscall(LANDLOCK_RESTRICT, rules, 0) == 0
    os.close(rules)
    return [name for name, since in walls.items() if version >= since] if restricted else []


def allow(rules: int, place: int, what: int) -> None:
    """Let through to a file, or to all below a folder.

    Raises:
        OSError: the kernel does not take the rule.
    """
    if libc.syscall(LANDLOCK_ADD, rules, 1, struct.pack("=Qi", what, place), 0) != 0:
        raise OSError(ctypes.get_errno(), "landlock_add_rule")


def separate() -> tuple[list[str], bool]:
    """Leave the network, and the processes of others; root becomes the user `nobody`.

    Returns:
        The walls, and whether there is a user namespace, which counts its own processes only.
    """
    walls: list[str] = []
    own = False
    if os.geteuid() == 0:
        if libc.unshare(APART) == 0:
            walls += ["network", "processes"]
            keep_nothing_in_kernel()
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    if not walls and libc.unshare(NEW_USER | APART) == 0:
        walls, own = ["network", "processes"], True
        keep_nothing_in_kernel()
    return walls, own


def keep_nothing_in_kernel() -> None:
    """Allow no System V objects in this namespace, where the kernel lets us; else they end with it."""
    for name in KEPT_IN_KERNEL:
        try:
            place = os.open(f"/proc/sys/kernel/{name}", os.O_WRONLY)
            os.write(place, b"0")
            os.close(place)
        except OSError:
            continue


def open_library() -> dict[str, int]:
    """Open the folders of modules and their libraries, to which the user `nobody` may have no access."""
    folders = [*sys.path, f"{sys.base_prefix}/lib"]
    return {path: os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in folders if os.path.isdir(path)}  # noqa: PTH112 - pathlib is not worth its time


def keep_library(folders: dict[str, int]) -> None:
    """Reach the folders that can no longer be entered by name through their descriptors.

    Raises:
        OSError: one cannot be read at all.
    """
    lost = {path: f"/proc/self/fd/{place}" for path, place in folders.items() if not os.access(path, os.R_OK | os.X_OK)}
    if lost:
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # else /proc/self/fd is root's
    packages = [found for module in sys.modules.values() if isinstance(found := getattr(module, "__path__", 0), list)]
    for path, instead in lost.items():
        os.listdir(instead)  # noqa: PTH208 - pathlib is not worth its time
        for places in (sys.path, *packages):
            places[:] = [instead + each[len(path) :] if f"{each}/".startswith(f"{path}/") else each for each in places]


def running() -> int:
    """Processes and threads of this user, which count against its limit."""
    count = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid == os.getuid():
                    count += len(os.listdir(f"/proc/{entry.name}/task"))  # noqa: PTH208 - pathlib is not worth its time
            except OSError:
                continue  # it ended while we looked
    return count


def limit(limits: dict[str, Any], existing: int) -> None:
    """Set what may be used, in addition to the `existing` processes; none of it can be raised again."""
    for name, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, limits["processes"] + existing),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
    ):
        resource.setrlimit(name, (value, value))


def in_child() -> None:
    """Go on in a child, the first process of its namespace: what it leaves behind ends with it."""
    child = os.fork()
    if child == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        return
    _, status = os.waitpid(child, 0)
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def run(program: str, scope: dict[str, Any]) -> str | None:
    """What it raised, in a line; None where it came to its end.

    Args:
        program: its source.
        scope: its globals; what it leaves as `RESULT` must be JSON-like and have room.
    """
    try:
        exec(compile(program, "answer", "exec", dont_inherit=True), scope)
        if (size := len(json.dumps(scope.get("RESULT")))) > MOST_RESULT:
            return f"its result takes {size} bytes, at most {MOST_RESULT} are read"
    except SystemExit:
        return "left before its last line"
    except MemoryError:
        return "MemoryError: used up its memory"
    except BaseException as error:
        return " ".join(f"{type(error).__name__}: {error}"[:MOST_ERROR].split())
    return None


def main() -> None:
    """Read the task, build the walls, run, tell."""
    task = json.load(sys.stdin)
    output = os.dup(1)
    nothing = os.open("/dev/null", os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    try:
        library = open_library()
        walls, own = separate()
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a change of user clears it
        if walls:
            in_child()
        keep_library(library)
        limit(task["limits"], 2 if own else running())
        walls += restrict_files(".", list(library.values()))
        if missing := [wall for wall in task["walls"] if wall not in walls]:
            raise OSError(
                f"this machine's kernel has no wall against {', '.join(missing)}, which sandbox.walls asks for"
            )
    except (OSError, ValueError) as error:
        tell(output, {"done": task["done"], "fault": str(error)})
    scope = {"__name__": "__main__", "GIVEN": task["given"]}
    raised = run(task["program"], scope)
    result = scope.get("RESULT") if raised is None else None
    tell(output, {"done": task["done"], "error": raised, "walls": walls, "result": result})


def tell(output: int, what: dict[str, Any]) -> NoReturn:
    """The last line of what is said, and the end."""
    os.write(output, b"\n" + json.dumps(what).encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    main()
