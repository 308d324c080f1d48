from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str, cwd: Path, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": path if path is not None else os.defpath}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that `make venv` reads, without an environment."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "scripts/make_venv.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


BROKEN = (0, 0)
AS_VERSION = "import sys; sys.version_info = (%d, %d, 0); exec(sys.argv[1])"


def fake_path(folder: Path, pythons: dict[str, tuple[int, int]]) -> str:
    """A PATH with the tools of a shell, and Pythons of these versions that only say what they are asked to do."""
    folder.mkdir()
    for tool in ("bash", "dirname", "env", "make", "touch"):
        (folder / tool).symlink_to(shutil.which(tool) or "")
    for name, version in pythons.items():
        answer = "exit 127" if version == BROKEN else f'exec {sys.executable} -c "{AS_VERSION % version}" "$2"'
        script = folder / name
        script.write_text(f'#!/bin/sh\n[ "$1" = -m ] && echo "chose $0 for $3" && exit 9\n{answer}\n', encoding="utf-8")
        script.chmod(0o755)
    return str(folder)


def test_help_lists_every_target() -> None:
    shown = run("make", cwd=ROOT).stdout
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.findall(r"^  ([a-z-]+) +\S", shown, re.MULTILINE) == phony.split()


@pytest.mark.parametrize(
    "pythons",
    [{}, {"python3": (3, 10)}, {"python3": (3, 13), "python": (2, 7)}, {"python3.12": BROKEN, "python3": (3, 13)}],
)
def test_a_machine_without_a_fitting_python_is_told_so(
    checkout: Path, tmp_path: Path, pythons: dict[str, tuple[int, int]]
) -> None:
    result = run("make", "venv", cwd=checkout, path=fake_path(tmp_path / "bin", pythons))
    assert result.returncode != 0
    assert "turnout needs Python 3.11 or 3.12" in result.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        ({"python3.11": (3, 11), "python3.12": (3, 12), "python3": (3, 12)}, "python3.11"),
        ({"python3.11": BROKEN, "python3.12": (3, 12), "python3": (3, 11)}, "python3.12"),
        ({"python3": (3, 11)}, "python3"),
        ({"python3": (3, 13), "python": (3, 12)}, "python"),
    ],
)
def test_the_first_python_that_fits_is_taken(
    checkout: Path, tmp_path: Path, pythons: dict[str, tuple[int, int]], chosen: str
) -> None:
    result = run("make", "venv", cwd=checkout, path=fake_path(tmp_path / "bin", pythons))
    assert f"/bin/{chosen} for " in result.stdout


def test_a_ready_environment_is_left_alone_until_its_inputs_change(checkout: Path) -> None:
    stamp = checkout / ".venv" / ".installed"
    stamp.parent.mkdir()
    stamp.touch()
    assert "scripts/make_venv.sh" not in run("make", "-n", "venv", cwd=checkout).stdout
    assert run("make", "venv", cwd=checkout).returncode == 0
    os.utime(checkout / "constraints.txt", (time.time() + 60, time.time() + 60))
    assert "scripts/make_venv.sh" in run("make", "-n", "venv", cwd=checkout).stdout


def test_ci_runs_what_people_run() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = [line for line in script.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    assert commands == [
        "set -euo pipefail",
        'cd "$(dirname "$0")/.."',
        "make venv",
        "make lint",
        "make docs",
        "make test",
        "scripts/debian_packages.sh chromium prometheus",
        "make test-smoke",
    ]
