"""Models behind URLs that fsspec reads: copied to this program's cache, and copied again when they change there."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

from turnout.atomic_files import write_whole
from turnout.cache_lock import cache_folder, locked
from turnout.checkpoint_files import WEIGHT_FILES
from turnout.errors import Code, TurnoutError, invalid
from turnout.gguf_files import shard_names
from turnout.model_files import Found, complete, complete_file, description, lacking, missing, weights_entry
from turnout.model_location import GGUF, StoredFiles

# What stores say of a file by which a change of it shows, the surest first.
MARKS = (
    "ETag",
    "etag",
    "Content-MD5",
    "md5Hash",
    "Digest",
    "crc32c",
    "CRC",
    "generation",
    "LastModified",
    "Last-Modified",
    "last_modified",
    "updated",
    "mtime",
    "created",
)
log = logging.getLogger(__name__)
CURRENT = "current.json"
CHUNK = 8 << 20  # bytes
DEPTH = 2  # of folders that are listed


@dataclass
class StoredVersion:
    """The files of a URL as they were when they were listed; see `model_files.RemoteFiles`.

    Attributes:
        name: the URL.
        folder: where they are copied to.
        sizes: bytes of each file.
        marks: what tells versions of a file apart; None where the store says nothing.
        system: reads them, from
        root: there.
        field: the model's place in the configuration, for messages.
        alone: whether no other process copies them; others have temporary names of their own.
    """

    name: str
    folder: Path
    sizes: Mapping[str, int]
    marks: Mapping[str, str | None]
    system: Any
    root: str
    field: str
    alone: bool = True
    cache_setting: str = "XDG_CACHE_HOME"

    def begun(self, names: Iterable[str]) -> int:
        """Bytes that broken-off copies left and that are continued."""
        return sum(self._begun(name) for name in names)

    def bring(self, names: Sequence[str]) -> None:
        """Copy files, each to a temporary name that is renamed when it is whole; a copy that broke off is continued.

        Raises:
            TurnoutError: the store fails, the disk is full, or a file does not have the size that was listed.
        """
        from turnout.download_bar import DownloadBar

        total = sum(self.sizes[name] for name in names)
        with (
            _refusals(self.name, self.field),
            DownloadBar(total=total, unit="B", unit_scale=True, desc=self.name) as bar,
        ):
            for name in names:
                self._copy(name, bar.update)

    def _copy(self, name: str, advance: Any) -> None:
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        part, begun = self._part(name), self._begun(name)
        whole = {"block_size": 0} if "https" in self.system.protocol else {}  # asks a web server for no parts
        try:
            self._append(name, begun, advance)
        except ValueError:  # what fsspec raises where a store gives files from their start only
            if not begun and not whole:
                raise
            self._append(name, 0, advance, whole)
        if (size := part.stat().st_size) != self.sizes[name]:
            part.unlink()
            message = f"{self.name}: {name} should have {self.sizes[name]} bytes, and {size} came; try again"
            raise TurnoutError(Code.UNAVAILABLE, f"{self.field}: {message}", self.field)
        part.replace(target)

    def _append(self, name: str, start: int, advance: Any, options: Mapping[str, Any] = MappingProxyType({})) -> None:
        place = self._place(name)
        with self.system.open(place, "rb", **options) as source, self._part(name).open("ab" if start else "wb") as copy:
            if start:
                source.seek(start)
                advance(start)
            while data := source.read(CHUNK):
                copy.write(data)
                advance(len(data))

    def _part(self, name: str) -> Path:
        target = self.folder / name
        own = "" if self.alone else f".{platform.node()}.{os.getpid()}"
        return target.with_name(f".{target.name}{own}.part")

    def _begun(self, name: str) -> int:
        """Bytes of a copy that is continued; where a change would not show, the rest may be of another file."""
        part = self._part(name)
        size = part.stat().st_size if self.marks[name] is not None and part.is_file() else 0
        return size if size <= self.sizes[name] else 0

    def _place(self, name: str) -> str:
        if (file := _file_of(self.name)) is not None:
            return _place_of(self.root, file, name)
        return f"{self.root.rstrip('/')}/{name}" if self.root else name


def fetch(stored: StoredFiles, field: str, weights: bool = True) -> Path:
    """Copy what is needed of a URL and is not in the cache.

    Args:
        stored: the URL.
        field: the model's place in the configuration, for messages.
        weights: whether weights are needed, too.

    Returns:
        The folder of the checkpoint, or its GGUF file. Files that change at the URL get a folder of their own.

    Raises:
        TurnoutError: in one line: the scheme is unknown or its package missing, there is nothing that can be loaded,
            the disk has no room, or the store fails and the cache lacks files.
    """
    with locked(stored.url) as alone:
        try:
            version = _listed(stored, field)
            version.alone = alone
        except TurnoutError as error:
            if error.code is Code.UNAVAILABLE and (path := find(stored, weights).path) is not None:
                log.warning("%s cannot be read; what the cache holds of it is used", stored.url)
                return path
            raise
        if (file := _file_of(stored.url)) is not None:
            path = complete_file(version, file, field)
        else:
            path = complete(version, field, weights)
        _note_current(version, _home(stored) / CURRENT)
        return path


def _note_current(version: StoredVersion, place: Path) -> None:
    current = json.dumps({"folder": version.folder.name, "sizes": dict(version.sizes)}).encode()
    with suppress(OSError):  # in a cache that is only read, all files are there
        if not place.is_file() or place.read_bytes() != current:
            write_whole(place, current)


def find(stored: StoredFiles, weights: bool = True) -> Found:
    """Look for a URL's files in the cache; nothing is asked of the store."""
    try:
        current = json.loads((_home(stored) / CURRENT).read_text(encoding="utf-8"))
        folder, sizes = _home(stored) / current["folder"], current["sizes"]
    except (OSError, ValueError, KeyError, TypeError):
        return Found(None)
    if (file := _file_of(stored.url)) is not None:
        lacks = missing(folder, sizes, shard_names(file))
        return Found(None if lacks else folder / file, tuple(lacks))
    lacks = lacking(folder, sizes, weights)
    return Found(None if lacks else folder, tuple(lacks))


def _listed(stored: StoredFiles, field: str) -> StoredVersion:
    """Ask the store for the files of a URL.

    Raises:
        TurnoutError: INVALID_ARGUMENT: there is nothing, or no such scheme; UNAVAILABLE: the store fails.
    """
    import fsspec

    try:
        system, root = fsspec.core.url_to_fs(stored.url)
    except (ImportError, ValueError) as error:
        raise invalid(field, f"{stored.url} cannot be read: {' '.join(str(error).split())}") from None
    with _refusals(stored.url, field):
        system.invalidate_cache()
        if (file := _file_of(stored.url)) is not None:
            found = {name: system.info(_place_of(root, file, name)) for name in shard_names(file)}
        else:
            listed = system.find(root, maxdepth=DEPTH, detail=True)
            found = {path.removeprefix(root.rstrip("/")).lstrip("/"): info for path, info in listed.items()}
            found = {name: info for name, info in found.items() if ".." not in name.split("/")}
    if not found:
        raise invalid(field, f"{stored.url} holds no files")
    sizes = {name: info.get("size") for name, info in found.items()}
    if unknown := [name for name in _needed(sizes, file) if sizes[name] is None]:
        raise invalid(field, f"{stored.url}: the store does not say how large {unknown[0]} is")
    marks = {name: _mark(info) for name, info in found.items()}
    state = json.dumps([[name, sizes[name], marks[name]] for name in _needed(sizes, file)])
    folder = _home(stored) / hashlib.sha256(state.encode()).hexdigest()[:16]
    return StoredVersion(stored.url, folder, sizes, marks, system, root, field)


def _needed(sizes: Mapping[str, int], file: str | None) -> list[str]:
    """The files that a version consists of; others may change."""
    if file is not None:
        return shard_names(file)
    names = [name for name in sorted(sizes) if "/" not in name]
    weights = [name for name in names if any(fnmatchcase(name, each) for each in WEIGHT_FILES)]
    entry = weights_entry(sizes)
    return [*description(sizes), *weights, *([entry] if entry is not None and entry not in weights else [])]


def _mark(info: Mapping[str, Any]) -> str | None:
    return next((f"{key} {info[key]}" for key in MARKS if info.get(key) is not None), None)


def _file_of(url: str) -> str | None:
    """The name of the one file that a URL means, which a query may follow; None: it is of a folder."""
    path = url.partition("?")[0]
    return path.rpartition("/")[2] if path.endswith(GGUF) else None


def _place_of(root: str, file: str, name: str) -> str:
    """The place of a file in the folder of the one that `root` is of."""
    path, mark, query = root.partition("?")
    return path.removesuffix(file) + name + mark + query


def _home(stored: StoredFiles) -> Path:
    return cache_folder() / "models" / hashlib.sha256(stored.url.encode()).hexdigest()[:32]


@contextmanager
def _refusals(url: str, field: str) -> Iterator[None]:
    """Say in one line what a store raises; each has errors of its own.

    Raises:
        TurnoutError: in place of any other error.
    """
    try:
        yield
    except TurnoutError:
        raise
    except FileNotFoundError:
        raise invalid(field, f"{url}: there is nothing") from None
    except Exception as error:
        said = " ".join(str(error).split())
        if isinstance(error, OSError) and str(error.filename or "").startswith(str(cache_folder())):
            message = f"{url}: cannot write {error.filename}: {error.strerror}; set XDG_CACHE_HOME to another folder"
            raise TurnoutError(Code.PERMISSION_DENIED, f"{field}: {message}", field) from None
        if isinstance(error, PermissionError):
            message = f"{url}: access is refused ({said}): credentials are read where the store's own tools read them"
            raise TurnoutError(Code.PERMISSION_DENIED, f"{field}: {message}", field) from None
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"{url}: the disk of {cache_folder()} is full; free some, or set XDG_CACHE_HOME"
            raise TurnoutError(Code.RESOURCE_EXHAUSTED, f"{field}: {message}", field) from None
        message = f"{url} cannot be read, and the cache lacks files of it: {type(error).__name__}: {said}"
        raise TurnoutError(Code.UNAVAILABLE, f"{field}: {message}", field) from None
