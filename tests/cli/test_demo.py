from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.demo import PROMPT
from tests.deployments.conftest import poll
from turnout.config import TurnoutConfig
from turnout.free_ports import on_free_ports

ROOT = Path(__file__).parents[2]


def processes_with(marker: str) -> list[str]:
    """Command lines of processes that inherited this environment variable."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # gone, or not ours to read
    return found


@pytest.mark.cluster
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds left-over processes through /proc")
def test_the_demo_answers_over_grpc_and_leaves_no_process_behind(tmp_path: Path) -> None:
    marker = f"TURNOUT_DEMO_TEST={tmp_path}"
    result = subprocess.run(
        ["env", marker, sys.executable, "-m", "cli.demo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert re.search(r"^serving after \d+\.\d s: gRPC 127\.0\.0\.1:\d+, HTTP http://", result.stdout)
    assert PROMPT in result.stdout
    assert "Answer: " in result.stdout.replace("⟦", "").replace("⟧", "")
    assert re.search(r"^entropy_adaptive: \d+ tokens in ", result.stdout, re.MULTILINE)
    for meter in ("paper", "FLOPs", "wall clock"):
        assert re.search(rf"^ {meter} .*\d", result.stdout, re.MULTILINE), meter
    # Ray's workers end by themselves once their raylet has.
    poll(lambda: processes_with(marker) == [], "no process is left", 30)


def test_the_demo_stays_off_ports_that_are_in_use() -> None:
    config = on_free_ports(TurnoutConfig.demo())
    assert config.server.grpc_port != config.server.http_port
    assert config.model_copy(update={"server": TurnoutConfig.demo().server}) == TurnoutConfig.demo()
