"""Replies that Ray's object store has no room for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.cluster
def test_a_store_that_is_full_is_named_and_nobody_is_blamed() -> None:
    """In a process of its own: its Ray is set up so that nothing is spilled to disk."""
    folder = tempfile.mkdtemp(prefix="tf", dir="/tmp")
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "tests.actors.full_store", folder],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT), "PATH": os.defpath, "RAY_AUTH_MODE": "disabled"},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["blameless"]
    assert told["reason"].startswith(f"Ray's object store on node {told['ip']} is full")
    assert "--object-store-memory" in told["reason"]
