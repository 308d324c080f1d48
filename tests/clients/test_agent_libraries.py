"""Unmodified agent libraries: tools and an output type in one run, on a model whose template has no tools.

By chats and by the Responses API, whole and streamed; structured output by a schema and by a tool's call.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.site import Site

pytestmark = pytest.mark.clients

FOLDER = Path(__file__).parent / "agents"
LIBRARIES = ("openai-agents", "pydantic-ai-slim", "langchain-openai")
RUNS = 4 + 4 + 2 + 6


def test_agents_call_tools_and_end_with_their_output_type(site: Site, tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    command = [python, "-m", "pip", "install", "--quiet", "-r", FOLDER / "requirements.txt"]
    subprocess.run(command, check=True, timeout=300)
    run = [python, FOLDER / "program.py", site.url, site.keys["acme"]]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = {each["name"]: each for each in map(json.loads, done.stdout.splitlines())}
    assert len(found) == RUNS
    for name, each in found.items():
        assert isinstance(each["output"]["right"], bool)
        assert each["output"]["size"] in ("small", "large")
        assert set(each["used"]) <= {"Bern", "Oslo"}
        assert each["used"] or "required" not in name, name
        assert each["events"] > 5 or "streamed" not in name, name
    site.report.setdefault("clients", {})["Agents"] = _versions()
    site.assert_idle()


def _versions() -> str:
    lines = (FOLDER / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return ", ".join(line.replace("==", " ") for line in lines if line.startswith(LIBRARIES))
