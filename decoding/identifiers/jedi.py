"""Names by jedi's static analysis of Python: of the code so far, and of files that the request brings."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import re
import select
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from pydantic import Field, field_validator

from decoding.identifiers import _analysis
from decoding.identifiers.base import IdentifierProvider
from decoding.model import ModelPool
from turnout.errors import FieldError, invalid
from turnout.registry import MethodParams

HUNG_S = 10.0  # the longest deadline of a caller; then the process is ended
MOST_PATH = 200  # characters; a name on the disk has room for 255
MOST_CHARS = 1 << 18  # of all files, and of the code
MOST_ANSWERED = 16 << 20  # bytes of an answer
OWN = ("jedi", "parso")
PATH = re.compile(r"(?:\w[\w-]*/){0,8}\w[\w-]*\.pyi?", re.ASCII)


class JediParams(MethodParams):
    """Parameters of `jedi`."""

    path: Annotated[str, Field(description="where the code stands among `files`")] = "answer.py"
    files: Annotated[
        dict[str, str],
        Field(
            default_factory=dict,
            max_length=256,
            description="Python files of the repository, by path: imports are looked for in them",
        ),
    ]

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: str) -> str:
        _checked("path", path)
        return path

    @field_validator("files")
    @classmethod
    def _check_files(cls, files: dict[str, str]) -> dict[str, str]:
        for path in files:
            _checked("files", path)
        size = sum(map(len, files.values()))
        if size > MOST_CHARS:
            raise FieldError("files", f"are too large: {size} characters, at most {MOST_CHARS}")
        return files


def _checked(field: str, path: str) -> None:
    if len(path) > MOST_PATH or not PATH.fullmatch(path):
        raise FieldError(
            field,
            f"{path[:MOST_PATH]!r} is no relative path of a Python file: folders and a name in ASCII, ending in .py or"
            f" .pyi, at most {MOST_PATH} characters",
        )


class Jedi(IdentifierProvider):
    """See the module. The code is not executed, and it is read in a process apart: see `_analysis`."""

    Params = JediParams
    params: JediParams

    def __init__(self, params: Any = None) -> None:
        super().__init__(params)
        self._folder: TemporaryDirectory[str] | None = None

    def check(self, models: ModelPool) -> None:
        """See `Part.check`."""
        if find_spec("jedi") is None:
            raise invalid(self.where, "jedi is not installed: pip install 'turnout[code]'")

    async def names(self, code: str) -> list[str]:
        """See `IdentifierProvider.names`. Of code that is longer than files may be nothing is known."""
        if len(code) > MOST_CHARS:
            return []
        if self._folder is None:
            # A call that was cut may still write into it when it is removed.
            self._folder = TemporaryDirectory(prefix="turnout-jedi-", ignore_cleanup_errors=True)
        # One thread: one question at a time. A question that is cancelled before its turn is left out.
        return await asyncio.get_running_loop().run_in_executor(_thread, self._found, code, Path(self._folder.name))

    def _found(self, code: str, folder: Path) -> list[str]:
        for path, text in self.params.files.items():
            place = folder / path
            if not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text, encoding="utf-8", errors="replace")
        return _analyser.ask({"code": code, "folder": str(folder), "path": self.params.path})

    async def close(self) -> None:
        """See `IdentifierProvider.close`."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class Analyser:
    """The process that answers, started with the first question, and again when it has ended. Used by one thread.

    Args:
        program: file of Python that it runs.
    """

    def __init__(self, program: str) -> None:
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: dict[str, str]) -> list[str]:
        """Return the answer; empty where it takes longer than `HUNG_S`, or the process ends on it."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            found: list[str] = json.loads(_line(process))
            return found
        except (OSError, EOFError):
            self.close()
            return []

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _started(self) -> subprocess.Popen[bytes]:
        own = [str(Path(spec.origin).parent) for name in OWN if (spec := find_spec(name)) and spec.origin]
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", self._program, *own],
            cwd="/",
            env={},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def _line(process: subprocess.Popen[bytes]) -> bytes:
    """The next line that a process writes.

    Raises:
        TimeoutError: there is none within `HUNG_S`.
        EOFError: it has ended, or writes without an end.
    """
    assert process.stdout is not None
    found, until, place = b"", time.monotonic() + HUNG_S, process.stdout.fileno()
    poll = select.poll()
    poll.register(place, select.POLLIN)
    while not found.endswith(b"\n"):
        if not poll.poll(max(until - time.monotonic(), 0.0) * 1000):
            raise TimeoutError
        part = os.read(place, 1 << 16)
        found += part
        if not part or len(found) > MOST_ANSWERED:
            raise EOFError
    return found


_thread = ThreadPoolExecutor(1, "jedi")
_analyser = Analyser(_analysis.__file__)
atexit.register(_analyser.close)
PART = Jedi
