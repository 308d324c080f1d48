"""Servers of benchmarks end with what started them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCH = """
import sys
sys.path.append(sys.argv[1])
from benchmarks import served
from turnout.config import parse_config
served._wait_until_it_answers = lambda *_: None
pair = {"models": {"a": {"path": "none"}, "b": {"path": "none"}}, "pools": {"demo": {"small": "a", "large": "b"}}}
with served.running_server(parse_config(pair), "sleeper") as (pid, _):
    print(pid, flush=True)
    sys.stdin.read()
"""


def test_a_bench_that_is_terminated_ends_its_server(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text("import sys; sys.stdin.read()\n", encoding="utf-8")
    command = [sys.executable, "-c", BENCH, str(ROOT)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as bench:
        assert bench.stdout is not None
        server = int(bench.stdout.readline())
        os.kill(server, 0)
        bench.terminate()
        assert bench.wait(30) == 128 + 15
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)
