"""The process in which jedi reads untrusted code. Started by path, with the standard library and jedi alone.

jedi executes none of the code, but it follows what the code says: it imports compiled modules to look at them, lists
folders, and follows relative imports out of the project. So it has an empty environment and limits of its own, and
hooks refuse it all files but those of the question, of the standard library and of jedi.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

MEMORY_BYTES = 1 << 30
CPU_S = 600  # then it ends, and another is started
READS = ("open", "os.listdir", "os.scandir")
# Prefixes of what the analysis of code never needs.
REFUSED = (
    *("subprocess.", "socket.", "shutil.", "webbrowser.", "urllib.", "ctypes.dlopen", "os.exec", "os.fork", "os.spawn"),
    *("os.posix_spawn", "os.system", "os.kill", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link"),
    *("os.symlink", "os.truncate", "os.chmod", "os.chown", "os.utime"),
)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
PACKAGES = ("site-packages", "dist-packages")


class Wall:
    """Audit hook: what may be read and imported.

    Args:
        own: folders of jedi's own packages.

    Attributes:
        folder: of the question that is answered.
    """

    def __init__(self, own: list[str]) -> None:
        self.folder = ""
        self._own = [os.path.realpath(each) for each in own]
        self._library = [os.path.realpath(each) for each in (os.path.dirname(os.__file__), *sys.path)]  # noqa: PTH120
        self._modules = {*sys.stdlib_module_names, *map(os.path.basename, own)}

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        """See `sys.addaudithook`.

        Raises:
            PermissionError: it is refused.
            ImportError: the module is none of the standard library.
        """
        if event in READS:
            writes = event == "open" and isinstance(args[2], int) and args[2] & WRITES
            if writes or not (isinstance(args[0], int) or self._may_read(os.fsdecode(args[0] or "."))):
                raise PermissionError(f"{event} is refused")
        elif event == "import":
            if str(args[0]).partition(".")[0] not in self._modules:
                raise ImportError(f"{args[0]} is no module of the standard library")
        elif event.startswith(REFUSED):
            raise PermissionError(f"{event} is refused")

    def _may_read(self, path: str) -> bool:
        path = os.path.realpath(path)
        if any(_within(path, each) for each in (self.folder, *self._own) if each):
            return True
        is_package = any(f"{os.sep}{each}{os.sep}" in path for each in PACKAGES)
        return not is_package and any(_within(path, each) for each in self._library)


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + os.sep)


def completions(code: str, folder: str, path: str) -> list[str]:
    """Return what may follow some code, by its names; empty where the analysis fails.

    Args:
        code: as it would stand in `path`.
        folder: the project.
        path: of the code within it, which need not exist.
    """
    import jedi

    project = jedi.Project(folder, sys_path=list(sys.path), load_unsafe_extensions=False)
    try:
        # In this process: jedi would start another interpreter, which the hooks do not reach.
        script = jedi.Script(code, path=f"{folder}/{path}", project=project, environment=jedi.InterpreterEnvironment())
        return [str(each.name) for each in script.complete()]
    except MemoryError:
        raise
    except Exception:  # it fails on some code in ways of its own, and then knows nothing
        return []


def _limit() -> None:
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, CPU_S),
    ):
        with suppress(OSError, ValueError):  # a lower limit is set already, or the system has none
            resource.setrlimit(kind, (value, value))


def _prepare(own: list[str]) -> Wall:
    """Import jedi, then leave installed packages."""
    library = list(sys.path)
    sys.path += sorted({os.path.dirname(each) for each in own})  # noqa: PTH120
    import jedi  # noqa: F401
    from parso import cache

    sys.path[:] = library
    trees: Any = cache  # of callers' files, which would be kept on the disk and read back, and cleared once a day
    trees._save_to_file_system = trees._load_from_file_system = trees._remove_cache_and_update_lock = _nothing
    return Wall(own)


def _nothing(*args: Any, **named: Any) -> None:
    """In place of a cache on the disk."""


def main(own: list[str], analyse: Callable[..., list[str]] = completions) -> None:
    """Answer questions, each a line of JSON, until there are no more.

    Args:
        own: folders of jedi's packages.
        analyse: answers one.
    """
    questions, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDWR)
    for each in (0, 1, 2):  # a module that prints must not be taken for an answer
        os.dup2(null, each)
    wall = _prepare(own)
    _limit()
    sys.addaudithook(wall)
    for line in questions:
        question = json.loads(line)
        wall.folder = os.path.realpath(question["folder"])
        print(json.dumps(analyse(**question)), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
