"""Unmodified agent libraries: tools and an output type in one run, on a model whose template has no tools."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.site import Site

pytestmark = pytest.mark.clients

FOLDER = Path(__file__).parent / "agents"


def test_agents_call_tools_and_end_with_their_output_type(site: Site, tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    command = [python, "-m", "pip", "install", "--quiet", "-r", FOLDER / "requirements.txt"]
    subprocess.run(command, check=True, timeout=300)
    run = [python, FOLDER / "program.py", site.url, site.keys["acme"]]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = {each["name"]: each for each in map(json.loads, done.stdout.splitlines())}
    assert len(found) == 6
    for each in found.values():
        assert isinstance(each["output"]["right"], bool)
        assert each["output"]["size"] in ("small", "large")
        assert set(each["used"]) <= {"Bern", "Oslo"}
    assert found["agents required"]["used"]
    assert found["agents required, streamed"]["used"]
    assert found["agents required, streamed"]["events"] > 5
    site.assert_idle()
