"""Machines on which the compiled CPU kernels cannot be had, and the command that builds them."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import engine.backends.base
from engine.backends.base import choose_backend
from engine.backends.native import library as native
from engine.backends.native.library import NativeUnavailableError
from tests.engine.harness import CPU
from turnout.errors import TurnoutError


@pytest.fixture(autouse=True)
def forget() -> Any:
    native._find.cache_clear()
    engine.backends.base._say_once.cache_clear()
    yield
    native._find.cache_clear()


def test_without_a_compiler_auto_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert choose_backend("auto", CPU).name == "torch"
    assert "no C++ compiler found" in caplog.text
    assert "install g++" in caplog.text


def test_without_a_compiler_native_is_refused_with_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    with pytest.raises(TurnoutError, match=r"set engine\.kernels to auto or torch") as caught:
        choose_backend("native", CPU)
    assert caught.value.field == "engine.kernels"


def test_a_processor_without_the_instructions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_processor_flags", lambda: "fpu sse2 avx")
    with pytest.raises(NativeUnavailableError, match="lacks avx2, f16c, fma"):
        native.library()


def test_a_compiler_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_cache_folder", lambda: tmp_path)
    monkeypatch.setattr(native, "FLAGS", ("-std=c++17", "-DLANES=broken(", "-march=x86-64"))
    with pytest.raises(NativeUnavailableError, match=r"do not compile: .*error"):
        native.library()
    assert list(tmp_path.iterdir()) == []


def test_a_build_is_kept_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    native.library()
    native._find.cache_clear()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(native, "_compile", refuse)
    assert native.library().turnout_forward is not None


def test_the_command_says_so() -> None:
    done = subprocess.run([sys.executable, "-m", "engine.backends.native"], capture_output=True, text=True, check=True)
    assert "the CPU kernels are compiled" in done.stdout
