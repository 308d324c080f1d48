"""A start that cannot succeed ends at once, and says what is missing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.launch.conftest import ROOT, TOOLS
from turnout.free_ports import free_port


@pytest.mark.cluster
def test_a_resource_that_this_machine_lacks_is_refused_at_once(tmp_path: Path) -> None:
    large = {"models": "actors", "resources": {"large": {"target": 1}}}
    config = {
        "models": {"small": {"path": "demo:small"}, "large": {"path": "demo:large"}},
        "pools": {"p": {"small": "small", "large": "large", "placement": large}},
        "server": {"grpc_port": free_port(), "http_port": free_port()},
        # Nothing that Ray could ever place is asked of it.
        "ray": {"start_timeout_s": 600},
    }
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    ended = subprocess.run(
        [TOOLS / "turnout", "serve", file], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    said = " ".join(ended.stderr.split())
    assert "pool 'p' needs a node with {CPU: 1, target: 1}; target is short (1 asked, 0 there)" in said
    assert "add such a node, or change pools.p.placement.resources" in said
