"""Models behind URLs that fsspec reads: copied once, copied again when they change, whole or not at all."""

from __future__ import annotations

import errno
import io
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.checkpoint_folders import write_checkpoint
from turnout import model_files, stored_models
from turnout.checkpoint_files import check_checkpoint
from turnout.errors import Code, TurnoutError
from turnout.model_location import StoredFiles

FIELD = "models.m.path"
STORED = StoredFiles("memory://bucket/tiny")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryFileSystem]:
    """A store in memory that holds a checkpoint, and other things."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    system = MemoryFileSystem()
    for path in write_checkpoint(tmp_path / "tiny").iterdir():
        system.pipe(f"/bucket/tiny/{path.name}", path.read_bytes())
    system.pipe("/bucket/tiny/README.md", b"# tiny")
    system.pipe("/bucket/tiny/modeling_tiny.py", b"raise SystemExit")
    yield system
    system.store.clear()


@pytest.fixture
def opened(store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read from the store."""
    names: list[str] = []
    plain: Callable[..., Any] = MemoryFileSystem._open

    def note(self: MemoryFileSystem, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "rb":
            names.append(path.rpartition("/")[2])
        return plain(self, path, mode, **options)

    monkeypatch.setattr(MemoryFileSystem, "_open", note)
    return names


def fail(*_: object, **__: object) -> None:
    raise ConnectionError("no route to the store")


def test_what_is_needed_is_copied_once(store: MemoryFileSystem, opened: list[str]) -> None:
    assert stored_models.find(STORED).path is None
    folder = stored_models.fetch(STORED, FIELD)
    check_checkpoint(folder, FIELD)
    assert {path.name for path in folder.iterdir()} == set(opened)
    assert not {"README.md", "modeling_tiny.py"} & set(opened)
    opened.clear()
    assert stored_models.fetch(STORED, FIELD) == stored_models.find(STORED).path == folder
    store.pipe("/bucket/tiny/README.md", b"# other")
    assert stored_models.fetch(STORED, FIELD) == folder
    assert opened == []


def test_files_that_changed_are_copied_to_another_folder(store: MemoryFileSystem) -> None:
    first = stored_models.fetch(STORED, FIELD)
    data = store.cat("/bucket/tiny/config.json")
    store.pipe("/bucket/tiny/config.json", data.replace(b"512", b"256"))
    second = stored_models.fetch(STORED, FIELD)
    assert second != first
    assert (first / "config.json").read_bytes() == data != (second / "config.json").read_bytes()


def test_a_copy_that_broke_off_is_continued(
    store: MemoryFileSystem, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(256)) * 64
    store.pipe("/bucket/tiny/model.safetensors", data)
    monkeypatch.setattr(stored_models, "CHUNK", 1 << 10)
    with monkeypatch.context() as patch:
        left = iter(range(3))
        plain = stored_models.StoredVersion._copy

        def breaks(self: Any, name: str, advance: Any) -> None:
            plain(self, name, advance if name != "model.safetensors" else lambda _: next(left))

        patch.setattr(stored_models.StoredVersion, "_copy", breaks)
        with pytest.raises(TurnoutError):
            stored_models.fetch(STORED, FIELD)
    [part] = (stored_models.cache_folder() / "models").rglob(".model.safetensors.part")
    assert data.startswith(part.read_bytes())
    assert part.stat().st_size == 4 << 10
    part.write_bytes(b"?" * part.stat().st_size)  # by which it shows that these are not copied again
    folder = stored_models.fetch(STORED, FIELD)
    assert (folder / "model.safetensors").read_bytes() == b"?" * (4 << 10) + data[4 << 10 :]
    assert opened.count("config.json") == 1


def test_a_file_of_another_size_than_listed_is_refused(
    store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = MemoryFileSystem.find

    def longer(self: MemoryFileSystem, *args: Any, **options: Any) -> Any:
        found = plain(self, *args, **options)
        return {path: info | {"size": info["size"] + ("tokenizer.json" in path)} for path, info in found.items()}

    monkeypatch.setattr(MemoryFileSystem, "find", longer)
    with pytest.raises(
        TurnoutError, match=r"^models\.m\.path: memory://bucket/tiny: tokenizer\.json should have \d+ bytes"
    ):
        stored_models.fetch(STORED, FIELD)
    assert not list((stored_models.cache_folder() / "models").rglob("*tokenizer.json*"))


def test_a_store_that_is_gone(store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = stored_models.fetch(STORED, FIELD)
    monkeypatch.setattr(MemoryFileSystem, "find", fail)
    assert stored_models.fetch(STORED, FIELD) == folder
    (folder / "model.safetensors").unlink()
    with pytest.raises(TurnoutError, match=r"lacks files of it: ConnectionError: no route to the store$") as caught:
        stored_models.fetch(STORED, FIELD)
    assert caught.value.code is Code.UNAVAILABLE
    assert stored_models.fetch(STORED, FIELD, weights=False) == folder


def test_one_file(store: MemoryFileSystem) -> None:
    store.pipe("/bucket/q4.gguf", b"GGUF 4")
    assert stored_models.fetch(StoredFiles("memory://bucket/q4.gguf"), FIELD).read_bytes() == b"GGUF 4"
    names = [f"q8-0000{number}-of-00002.gguf" for number in (1, 2)]
    for name in names:
        store.pipe(f"/bucket/{name}", name.encode())
    shard = StoredFiles(f"memory://bucket/{names[1]}")
    found = stored_models.fetch(shard, FIELD)
    assert [found.with_name(name).read_text() for name in names] == names
    assert stored_models.find(shard).path == found
    found.with_name(names[0]).unlink()
    assert stored_models.find(shard).lacking == (names[0],)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("memory://bucket/none", "memory://bucket/none"),
        ("memory://bucket/none.gguf", "there is nothing"),
        ("nostore://bucket/a", "Protocol not known: nostore"),
    ],
)
def test_nothing_to_copy_is_one_line(store: MemoryFileSystem, url: str, says: str) -> None:
    with pytest.raises(TurnoutError) as caught:
        stored_models.fetch(StoredFiles(url), FIELD)
    assert caught.value.message.startswith(f"{FIELD}: {url}")
    assert says in caught.value.message
    assert "\n" not in caught.value.message


def test_an_archive_is_a_store(store: MemoryFileSystem, tmp_path: Path) -> None:
    archive = shutil.make_archive(str(tmp_path / "tiny"), "zip", tmp_path / "tiny")
    check_checkpoint(stored_models.fetch(StoredFiles(f"zip://::file://{archive}"), FIELD), FIELD)


def broken_off(left: int) -> Path:
    """The folder of a copy that broke off before the last bytes of the weights."""
    folder = stored_models.fetch(STORED, FIELD)
    weights = folder / "model.safetensors"
    (folder / ".model.safetensors.part").write_bytes(weights.read_bytes()[:-left])
    weights.unlink()
    return folder


def test_room_is_needed_only_for_the_rest_of_a_copy(store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = broken_off(10)
    monkeypatch.setattr(model_files.shutil, "disk_usage", lambda _: SimpleNamespace(free=9))
    with pytest.raises(TurnoutError, match=r"10 B are to be downloaded, and the disk of .* has 9 B free"):
        stored_models.fetch(STORED, FIELD)
    monkeypatch.setattr(model_files.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    assert stored_models.fetch(STORED, FIELD) == folder


def test_a_copy_that_cannot_be_continued_is_made_anew(store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    class FromItsStart(io.BytesIO):
        def seek(self, *_: Any) -> int:
            raise ValueError("Cannot seek")

    folder = broken_off(10)
    monkeypatch.setattr(
        MemoryFileSystem, "_open", lambda self, path, *_, **__: FromItsStart(self.store[path].getvalue())
    )
    assert stored_models.fetch(STORED, FIELD) == folder
    check_checkpoint(folder, FIELD)


def test_a_cache_that_holds_all_need_not_be_written(store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    folder = stored_models.fetch(STORED, FIELD)
    monkeypatch.setattr(stored_models, "write_whole", refuse)
    assert stored_models.fetch(STORED, FIELD) == folder


def test_a_cache_that_cannot_be_written_is_named(store: MemoryFileSystem, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(TurnoutError, match=r"tiny: cannot write .*/cache/.*; set XDG_CACHE_HOME to another folder$"):
        stored_models.fetch(STORED, FIELD)


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def test_a_web_server_that_knows_no_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends whole files, and says by their time only that they changed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "served/m.gguf"
    file.parent.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(file.parent))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stored = StoredFiles(f"http://127.0.0.1:{server.server_port}/m.gguf?download=true")
        for number in (1, 2):
            file.write_bytes(bytes([number]) * (6 << 20))  # more than fsspec asks for at once
            os.utime(file, (number, number))
            assert stored_models.fetch(stored, FIELD).read_bytes() == file.read_bytes()
        server.shutdown()


def test_copies_without_a_lock_do_not_share_a_file(store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    folder = broken_off(10)
    monkeypatch.setattr("turnout.cache_lock.FileLock.acquire", refuse)
    begun = (folder / ".model.safetensors.part").read_bytes()
    assert stored_models.fetch(STORED, FIELD) == folder
    assert (folder / ".model.safetensors.part").read_bytes() == begun, "it may be another process's"
    check_checkpoint(folder, FIELD)
