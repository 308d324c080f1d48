"""The files of a checkpoint that are needed, out of what a remote place holds, and room for them on the disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

from turnout.checkpoint_files import ADAPTER, CONFIG, INDEX, QUANTIZED_FILES, TEXT_FILES, WEIGHTS
from turnout.errors import Code, TurnoutError, invalid
from turnout.gguf_files import shard_names
from turnout.model_location import GGUF

# All that is read of a checkpoint but its weights. Code and other frameworks' files match none of these.
DESCRIPTION = (CONFIG, *TEXT_FILES, *QUANTIZED_FILES, ADAPTER)
TEMPLATES = "additional_chat_templates/*.jinja"
UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


@dataclass(frozen=True, slots=True)
class Found:
    """What a cache of this machine holds of a model; nothing was looked up elsewhere.

    Attributes:
        path: folder or file to load from; None: not all of it is here.
        lacking: files that are known to be missing; empty where nothing is known.
    """

    path: Path | None
    lacking: tuple[str, ...] = ()


class RemoteFiles(Protocol):
    """Files of a remote place, and the folder of this machine that they are copied to.

    Attributes:
        name: the place, as the configuration names it.
        folder: where its files lie on this machine.
        sizes: bytes of each file of the place.
        cache_setting: the environment variable that moves the cache.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 - see above
    @property
    def folder(self) -> Path: ...  # noqa: D102
    @property
    def sizes(self) -> Mapping[str, int]: ...  # noqa: D102
    @property
    def cache_setting(self) -> str: ...  # noqa: D102

    def begun(self, names: Iterable[str]) -> int:
        """Bytes of files that broken-off copies of them left, and that are not copied again."""

    def bring(self, names: Sequence[str]) -> None:
        """Copy files of `sizes` to the folder.

        Raises:
            TurnoutError: they could not be copied.
        """


def complete(files: RemoteFiles, field: str, weights: bool = True) -> Path:
    """Copy what is needed of a checkpoint and is not here yet.

    Args:
        files: of the place.
        field: the model's place in the configuration, for messages.
        weights: whether they are needed, too.

    Returns:
        The folder.

    Raises:
        TurnoutError: nothing there can be loaded, the disk has no room for it, or `bring` failed.
    """
    entry = check_loadable(files, field)
    _bring(files, description(files.sizes), field)
    if weights:
        _bring(files, [entry], field)
        if entry.endswith(INDEX):
            _bring(files, _shards(files, entry, field), field)
    return files.folder


def complete_file(files: RemoteFiles, file: str, field: str) -> Path:
    """Copy one GGUF file, unless it is here; of a shard, all that belong to it.

    Raises:
        TurnoutError: there is no such file, or as `complete`.
    """
    names = shard_names(file)
    if absent := [name for name in names if name not in files.sizes]:
        others = some(sorted(name for name in files.sizes if name.endswith(GGUF)))
        raise invalid(field, f"{files.name}: there is no file {absent[0]}; GGUF files there: {others or 'none'}")
    _bring(files, names, field)
    return files.folder / file


def lacking(folder: Path, sizes: Mapping[str, int], weights: bool = True) -> list[str]:
    """Name the files of a checkpoint that are needed and not in the folder; of shards, those that its index lists."""
    entry = weights_entry(sizes)
    wanted = description(sizes)
    if weights and entry is not None:
        wanted.append(entry)
        if entry.endswith(INDEX) and (folder / entry).is_file():
            wanted += _listed(folder / entry)
    return missing(folder, sizes, wanted)


def missing(folder: Path, sizes: Mapping[str, int], names: Iterable[str]) -> list[str]:
    """Those of the names that are not in the folder in their whole size."""
    return [name for name in names if not _is_whole(folder / name, sizes.get(name))]


def description(names: Collection[str]) -> list[str]:
    """Those of the names that describe a checkpoint: configuration, tokenizer, chat templates."""
    patterns = {0: DESCRIPTION, 1: (TEMPLATES,)}  # by how deep a file lies
    return [
        name
        for name in sorted(names)
        if any(fnmatchcase(name, pattern) for pattern in patterns.get(name.count("/"), ()))
    ]


def weights_entry(names: Collection[str]) -> str | None:
    """The weight file that is read, or the index of such files, as `checkpoint_files.weight_files` chooses it."""
    return next((each for name in WEIGHTS for each in (name, name + INDEX) if each in names), None)


def check_loadable(files: RemoteFiles, field: str) -> str:
    """The weight file or index that is read.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`: there is no checkpoint, with what there is instead.
    """
    names, entry = files.sizes, weights_entry(files.sizes)
    if CONFIG in names and entry is not None:
        return entry
    lacks = f"no weights ({' or '.join(WEIGHTS)}, or an index)" if CONFIG in names else f"no checkpoint ({CONFIG})"
    if ggufs := sorted(name for name in names if name.endswith(GGUF)):
        raise invalid(field, f"{files.name}: {lacks}; it holds GGUF files: name one of {some(ggufs, 8)} in the path")
    if ADAPTER in names:
        message = f"it holds an adapter ({ADAPTER}); merge it into its base model and save that"
        raise invalid(field, f"{files.name}: {lacks}: {message}")
    raise invalid(field, f"{files.name}: {lacks}; it holds {some(sorted(names)) or 'nothing'}")


def check_space(folder: Path, needed: int, what: str, field: str, setting: str) -> None:
    """Refuse a download that the file system has no room for.

    Args:
        folder: that is to hold it; need not exist.
        needed: bytes.
        what: is downloaded, for messages, as is
        field: the model's place in the configuration, and
        setting: the environment variable that moves the cache.

    Raises:
        TurnoutError: RESOURCE_EXHAUSTED, with both sizes.
    """
    place = next(each for each in (folder, *folder.parents) if each.is_dir())
    free = shutil.disk_usage(place).free
    if needed > free:
        message = (
            f"{what}: {shown_bytes(needed)} are to be downloaded, and the disk of {place} has {shown_bytes(free)} free;"
            f" free some, or set {setting} to a folder on another disk"
        )
        raise TurnoutError(Code.RESOURCE_EXHAUSTED, f"{field}: {message}", field)


def shown_bytes(count: float) -> str:
    """A size for people, in decimal units."""
    for unit in UNITS:
        if count < 1000 or unit == UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == UNITS[0] else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def some(names: Sequence[str], most: int = 3) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _bring(files: RemoteFiles, names: Sequence[str], field: str) -> None:
    wanted = missing(files.folder, files.sizes, names)
    if not wanted:
        return
    needed = sum(files.sizes[name] for name in wanted) - files.begun(wanted)
    check_space(files.folder, needed, files.name, field, files.cache_setting)
    files.bring(wanted)
    if short := missing(files.folder, files.sizes, wanted):
        raise _differs(files, short[0], field)


def _differs(files: RemoteFiles, name: str, field: str) -> TurnoutError:
    path = files.folder / name
    got = f"{path.stat().st_size} bytes" if path.is_file() else "nothing"
    message = f"{files.name}: {name} should have {files.sizes[name]} bytes, and {got} came; try again"
    return TurnoutError(Code.UNAVAILABLE, f"{field}: {message}", field)


def _shards(files: RemoteFiles, index: str, field: str) -> list[str]:
    listed = _listed(files.folder / index)
    if not listed:
        raise invalid(field, f"{files.name}: {index} has no weight_map from tensors to files")
    if absent := [name for name in listed if name not in files.sizes]:
        raise invalid(field, f"{files.name} lacks {some(absent)}, which {index} lists")
    return listed


def _listed(index: Path) -> list[str]:
    """The files that an index names; none where it is no index."""
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return sorted({str(name) for name in listed})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _is_whole(path: Path, size: int | None) -> bool:
    return path.is_file() and (size is None or path.stat().st_size == size)
