"""What a run of tests says when it ends, where what it has used crashes after the last of them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CRASHES_AFTER_PYTHON = """
import ctypes, sys

def test_it():
    libc = ctypes.CDLL(None)
    libc.on_exit(libc.abort, None)
    {uses}
    assert {holds}
"""


@pytest.mark.parametrize(
    ("uses", "holds", "status"),
    [
        ("sys.modules['ray'] = sys", True, 0),
        ("sys.modules['ray'] = sys", False, 1),
        ("pass", True, -signal.SIGABRT),
    ],
    ids=["passed", "failed", "without Ray"],
)
def test_a_run_with_ray_ends_with_the_status_of_its_tests(tmp_path: Path, uses: str, holds: bool, status: int) -> None:
    (tmp_path / "test_it.py").write_text(CRASHES_AFTER_PYTHON.format(uses=uses, holds=holds), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "tests.leaving", "-p", "no:cacheprovider"]
    settings = ["-c", str(ROOT / "pyproject.toml"), str(tmp_path)]
    ended = subprocess.run([*command, *settings], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == status, ended.stdout + ended.stderr
    assert f"1 {'passed' if holds else 'failed'}" in ended.stdout
