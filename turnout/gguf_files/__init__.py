"""Models in GGUF files: described once by the files of a checkpoint folder, so that everything else reads a folder.

The folder lies in the user's cache. It has config.json, generation_config.json, the tokenizer, the chat template, an
index of the tensors, and links to the GGUF files; no weight is copied.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import struct
import tempfile
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any

import platformdirs

from turnout.errors import invalid
from turnout.gguf_files.header import MAGIC, Header, StoredTensor, read_header
from turnout.gguf_files.settings import Metadata, config_of, generation_of
from turnout.gguf_files.tokenizer import tokenizer_config_of, tokenizer_of

INDEX = "gguf.index.json"
SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
LINK = "weights-{:05d}-of-{:05d}.gguf"
LINKS = "weights-*.gguf"  # of the folder that describes a model


def described(path: Path, field: str = "path") -> Path:
    """The checkpoint folder that describes a GGUF model, made where it is missing; any other path as it is.

    Args:
        path: of a GGUF file (any shard of several), of a folder with one model in GGUF and no config.json, or of
            anything else.
        field: its place in the configuration, for messages.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`: a folder with several models, a missing shard, or a file that
            is no GGUF, is cut off, or is not supported.
    """
    if (path.suffix == ".gguf" and path.is_file()) or _starts_as_gguf(path):
        files = _shards(path, field)
    elif path.is_dir() and not (path / "config.json").is_file() and (found := sorted(path.glob("*.gguf"))):
        models = {_shards(file, field, check=False)[0] for file in found}
        if len(models) > 1:
            names = ", ".join(sorted(model.name for model in models))
            raise invalid(field, f"{path} holds several GGUF models; name the file of one of them: {names}")
        files = _shards(found[0], field)
    else:
        return path
    files = [file.resolve() for file in files]
    folder = _cache() / _key(files)
    if not folder.is_dir():
        _write(folder, _contents(files, field), files)
    return folder


def shard_names(name: str) -> list[str]:
    """The files of the model that a GGUF file of this name belongs to; a name may have folders before it."""
    found = SHARD.fullmatch(name)
    if found is None or not 1 <= int(found["number"]) <= int(found["count"]):
        return [name]
    count = int(found["count"])
    return [f"{found['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def index_of(folder: Path) -> dict[str, StoredTensor] | None:
    """The tensors of a model that `described` has described, by name; None: another folder."""
    if not is_described(folder):
        return None
    values = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    return {name: StoredTensor(kind, tuple(shape), *rest) for name, (kind, shape, *rest) in values.items()}


def is_described(folder: Path) -> bool:
    """Whether a folder describes a GGUF model."""
    return (folder / INDEX).is_file()


def gguf_files(folder: Path) -> list[Path]:
    """The GGUF files of a described model, in their order; of another folder none, whatever it holds besides."""
    return sorted(folder.glob(LINKS)) if is_described(folder) else []


def _starts_as_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError:  # a folder, or nothing at all
        return False


def _shards(path: Path, field: str, check: bool = True) -> list[Path]:
    """All files of the model that one of them belongs to.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`: one is missing, unless `check` says no.
    """
    files = [path.with_name(name) for name in shard_names(path.name)]
    if check and (missing := [file.name for file in files if not file.is_file()]):
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise invalid(field, f"{path.parent} lacks {missing[0]}{more}, which {path.name} belongs to")
    return files


def _cache() -> Path:
    """Where descriptions are kept: the user's cache, or a folder of this process where that cannot be written."""
    folder = platformdirs.user_cache_path("turnout") / "gguf"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(_own_folder().name)


@cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="turnout-gguf-")


@cache
def _program() -> bytes:
    """A digest of this package: another one describes files anew."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).digest()


def _key(files: list[Path]) -> str:
    """A name for the files as they are now, of which nothing is read."""
    stats = [file.stat() for file in files]
    states = [
        (str(file), each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns)
        for file, each in zip(files, stats, strict=True)
    ]
    return hashlib.sha256(_program() + repr(states).encode()).hexdigest()[:32]


def _contents(files: list[Path], field: str) -> dict[str, Any]:
    """The files of the description: JSON values, or texts, by name."""
    headers = [read_header(file, field, number) for number, file in enumerate(files)]
    try:
        return _of_headers(headers, files, field)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
        said = " ".join(str(error).split())
        message = f"{files[0]}: its metadata has values that cannot be used ({type(error).__name__}: {said})"
        raise invalid(field, message) from None


def _of_headers(headers: list[Header], files: list[Path], field: str) -> dict[str, Any]:
    tensors = {name: stored for header in headers for name, stored in header.tensors.items()}
    whole = Header(headers[0].metadata, tensors)
    data = Metadata(whole, files, field)
    expected = data.values.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise data.refusal(f"its files hold {len(tensors)} tensors, not the {expected} that split.tensors.count names")
    contents: dict[str, Any] = {
        "config.json": config_of(data),
        "generation_config.json": generation_of(data),
        "tokenizer.json": tokenizer_of(data),
        "tokenizer_config.json": tokenizer_config_of(data),
        INDEX: {name: astuple(stored) for name, stored in tensors.items()},
    }
    if template := data.values.get("tokenizer.chat_template"):
        contents["chat_template.jinja"] = str(template)
    return contents


def _write(folder: Path, contents: dict[str, Any], files: list[Path]) -> None:
    """Write a description, whole or not at all: several processes may do so at once."""
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        for name, content in contents.items():
            text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, sort_keys=True)
            (made / name).write_text(text, encoding="utf-8")
        for number, file in enumerate(files, start=1):
            (made / LINK.format(number, len(files))).symlink_to(file)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
