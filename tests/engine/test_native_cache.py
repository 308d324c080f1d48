"""The folder in which the compiled CPU kernels are kept, with every fault that a file system has."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import engine.backends.base
from engine.backends.base import choose_backend
from engine.backends.native import library as native
from pool.local_pool import LocalPool
from tests.engine.harness import CPU, ask, pair_config


@pytest.fixture(scope="module")
def built() -> Path:
    """The library as this machine has it."""
    forget()
    return Path(native.library()._name)


def forget() -> None:
    native._find.cache_clear()
    engine.backends.base._say_once.cache_clear()


@pytest.fixture(autouse=True)
def cache_home(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty home for caches; at the end, all that was found out in it is forgotten."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield
    forget()


@pytest.fixture
def kept(tmp_path: Path, built: Path) -> Path:
    """The compiled library, where it is looked for."""
    folder = tmp_path / "turnout" / "native"
    folder.mkdir(parents=True)
    return Path(shutil.copy(built, folder))


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch, built: Path) -> list[Path]:
    """What was compiled, without the ten seconds that it takes."""
    made = list[Path]()

    def copied(compiler: str, runtime: str, target: Path) -> None:
        made.append(target)
        shutil.copy(built, target)

    monkeypatch.setattr(native, "_compile", copied)
    return made


def fall_back(caplog: pytest.LogCaptureFixture) -> str:
    """Choose twice, as for two models; the only warning."""
    notes = list[str]()
    with caplog.at_level(logging.WARNING):
        assert [choose_backend("auto", CPU, notes=notes).name for _ in range(2)] == ["torch", "torch"]
    [line] = caplog.messages
    assert notes == [line, line]
    return line


def test_a_file_where_the_folder_should_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "turnout").write_text("")
    line = fall_back(caplog)
    assert f"their folder {tmp_path / 'turnout' / 'native'} cannot be used: Not a directory" in line
    assert "set XDG_CACHE_HOME" in line


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_that_cannot_be_written(
    number: int, exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    if exists:
        (tmp_path / "turnout" / "native").mkdir(parents=True)
    make = os.mkdir

    def refuse(path: str, *more: Any, **named: Any) -> None:
        if Path(path).exists() or tmp_path not in Path(path).parents:
            return make(path, *more, **named)
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    assert f"cannot be used: {os.strerror(number)}; " in fall_back(caplog)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_is_full_when_the_library_is_to_be_kept(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = list[str]()

    def link(command: list[str]) -> None:
        tries.append(command[-1])
        Path(command[-1]).write_bytes(b"object code")

    def refuse(path: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(native, "_run", link)
    monkeypatch.setattr(native, "sync", refuse)
    assert f"cannot be used: {os.strerror(number)}; " in fall_back(caplog)
    assert [Path(path).name for path in tries] == ["kernels.o", "kernels.so"]  # once, not once for each model
    assert list((tmp_path / "turnout" / "native").iterdir()) == []


def test_a_file_system_that_no_library_may_be_loaded_from(
    kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: str) -> None:  # as dlopen's error comes out of ctypes
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(native.ctypes, "CDLL", refuse)
    assert f"{kept}: failed to map segment from shared object; set XDG" in fall_back(caplog)


def test_a_library_that_cannot_be_read(
    kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: refuse(path) if path == kept else read(path))
    assert "cannot be used: Permission denied; " in fall_back(caplog)


def test_a_user_without_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no HOME, and no entry for the user
    monkeypatch.chdir(tmp_path)
    assert "this user has no home; set XDG_CACHE_HOME" in fall_back(caplog)
    assert list(tmp_path.iterdir()) == []  # no folder that is called ~


@pytest.mark.parametrize("left", [0, 20, 4096, 0.5, -1])
def test_a_library_cut_short_is_compiled_again_once(
    left: float, kept: Path, compilations: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    whole = kept.read_bytes()
    kept.write_bytes(whole[: int(len(whole) * left) if left == 0.5 else int(left)])
    with caplog.at_level(logging.INFO):
        assert choose_backend("auto", CPU).name == "native"
    assert compilations == [kept]
    assert f"{kept} is damaged" in caplog.text
    native._find.cache_clear()
    assert native.library().turnout_panel() > 0
    assert compilations == [kept]


def test_two_who_find_no_library_compile_one(
    tmp_path: Path, compilations: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, barrier, is_whole = threading.local(), threading.Barrier(2), native._is_whole

    def seen(target: Path) -> bool:
        found = is_whole(target)
        if not hasattr(looked, "once"):
            looked.once = barrier.wait(60)  # until the other one has looked, too
        return found

    monkeypatch.setattr(native, "_is_whole", seen)
    with ThreadPoolExecutor(2) as threads:
        made = [done.result(60) for done in [threads.submit(native._load) for _ in range(2)]]
    assert [Path(each._name) for each in made] == compilations * 2
    assert [path.suffix for path in (tmp_path / "turnout" / "native").iterdir()] == [".so"]


def test_a_damaged_library_that_cannot_be_replaced(
    kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept.write_bytes(b"\x7fELF")

    def refuse(compiler: str, runtime: str, target: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(target))

    monkeypatch.setattr(native, "_compile", refuse)
    assert "cannot be used: Read-only file system; " in fall_back(caplog)


def test_the_command_says_so_in_one_line_of_any_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "größer").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "größer"))
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = subprocess.run([sys.executable, "-m", "engine.backends.native"], capture_output=True, text=True, check=True)
    [line] = done.stdout.splitlines()
    folder = tmp_path / "gr??er" / "turnout" / "native"
    reason = f"their folder {folder} cannot be used: Not a directory; "
    assert line.startswith(f"no compiled CPU kernels, decoding will be slower: {reason}")
    assert done.stderr == ""


async def test_a_model_is_loaded_and_answers_as_with_torch_kernels(
    pair_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "turnout").write_text("")
    texts = list[str]()
    for kernels in ("auto", "torch"):
        pool = LocalPool.load("pair", pair_config(pair_folder, kernels=kernels))
        texts.append((await ask(pool, "three", max_tokens=6)).text)
        notes = pool.notes
        await pool.close()
        if kernels == "auto":
            [note] = notes
            assert "cannot be used: Not a directory" in note
    assert texts[0] == texts[1] != ""
    [line] = [message for message in caplog.messages if "kernels" in message]
    assert line == note
