"""Names by jedi's static analysis of Python: of the code so far, and of files that the request brings."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from pydantic import Field, field_validator

from decoding.identifiers.base import IdentifierProvider
from decoding.model import ModelPool
from turnout.errors import FieldError, invalid
from turnout.registry import MethodParams

HUNG_S = 30.0  # a call that takes longer keeps its thread: the next ones get another
MOST_CHARS = 1 << 18  # of all files
PATH = re.compile(r"(?:\w[\w-]*/){0,8}\w[\w-]*\.pyi?")


class JediParams(MethodParams):
    """Parameters of `jedi`."""

    path: Annotated[str, Field(max_length=256, description="where the code stands among `files`")] = "answer.py"
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
    if not PATH.fullmatch(path):
        raise FieldError(
            field, f"{path!r} is no relative path of a Python file: folders and a name, ending in .py or .pyi"
        )


class Jedi(IdentifierProvider):
    """See the module. Nothing of the code is executed; compiled modules that it imports are loaded to be read."""

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
        """See `IdentifierProvider.names`."""
        if self._folder is None:
            # A call that was cut may still write into it when it is removed.
            self._folder = TemporaryDirectory(prefix="turnout-jedi-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        return await run_apart(lambda: self._found(code, folder))

    def _found(self, code: str, folder: Path) -> list[str]:
        """On the worker's thread."""
        for path, text in self.params.files.items():
            place = folder / path
            if not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text, encoding="utf-8")
        return completions(code, folder, folder / self.params.path)

    async def close(self) -> None:
        """See `IdentifierProvider.close`."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def completions(code: str, folder: Path, path: Path) -> list[str]:
    """Return what may follow some code, by its names; empty where the analysis fails.

    Args:
        code: as it would stand in `path`.
        folder: the project; nothing else on this machine is searched but installed packages.
        path: of the code, which need not exist.
    """
    import jedi

    project = jedi.Project(folder, load_unsafe_extensions=False)
    # Without this one, jedi would start an interpreter that it finds near the project.
    script = jedi.Script(code, path=path, project=project, environment=jedi.InterpreterEnvironment())
    try:
        return [str(each.name) for each in script.complete()]
    except Exception:  # it fails on some code in ways of its own, and then knows nothing
        return []


class _Worker:
    """Thread for calls that cannot be interrupted: jedi is used by one thread at a time."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], list[str]], asyncio.Future[list[str]]]] = SimpleQueue()
        self._began: float | None = None
        threading.Thread(target=self._run, name="jedi", daemon=True).start()

    @property
    def hangs(self) -> bool:
        """Whether the call that it works on has taken too long."""
        return self._began is not None and time.monotonic() - self._began > HUNG_S

    def put(self, work: Callable[[], list[str]], future: asyncio.Future[list[str]]) -> None:
        self._queue.put((work, future))

    def _run(self) -> None:
        while True:
            work, future = self._queue.get()
            if future.cancelled():  # its caller's deadline has passed
                continue
            self._began = time.monotonic()
            try:
                found, error = work(), None
            except Exception as raised:
                found, error = [], raised
            self._began = None
            try:
                future.get_loop().call_soon_threadsafe(_settle, future, found, error)
            except RuntimeError:  # the loop was closed
                continue


def _settle(future: asyncio.Future[list[str]], found: list[str], error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(found)


_worker: _Worker | None = None


async def run_apart(work: Callable[[], list[str]]) -> list[str]:
    """Run a call on the worker's thread; one that is cancelled before its turn is left out."""
    global _worker
    if _worker is None or _worker.hangs:
        _worker = _Worker()
    future: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
    _worker.put(work, future)
    return await future


PART = Jedi
