"""A cluster that `ray up` starts on this machine, from our own cluster file with other ports and another folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.local_nodes import TAG, LocalNodes
from turnout.free_ports import free_port

ROOT = Path(__file__).parents[2]
TOOLS = Path(sys.executable).parent
NETWORK = f"127.0.{os.getpid() % 200 + 40}"
HEAD_IP = f"{NETWORK}.1"


def poll(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not in {timeout_s} s: {what}"
        time.sleep(0.2)


@dataclass(frozen=True)
class Launched:
    """The cluster, and what a person at this machine has of it."""

    folder: Path
    file: Path
    address: str

    @property
    def nodes(self) -> LocalNodes:
        return LocalNodes(yaml.safe_load(self.file.read_text(encoding="utf-8"))["provider"], "turnout-test")

    def command(
        self, *words: str, timeout_s: float = 600, cwd: Path = ROOT, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a tool in a clean environment. Output goes to a file: what stays behind would keep a pipe open."""
        environment = {
            "PATH": f"{TOOLS}{os.pathsep}{os.defpath}",
            "HOME": str(self.folder / "home"),
            "TMPDIR": str(self.folder / "tmp"),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "400",
            **more,
        }
        with (self.folder / "out").open("w+") as out, (self.folder / "err").open("w+") as err:
            done = subprocess.run(
                words, cwd=cwd, env=environment, stdout=out, stderr=err, timeout=timeout_s, check=False
            )
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(words, done.returncode, out.read(), err.read())

    def execute(self, command: str, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
        """`ray exec`: run a command on the head."""
        return self.command("ray", "exec", "--no-config-cache", str(self.file), command, timeout_s=timeout_s)

    def ask(self, expression: str) -> Any:
        """Value of a Python expression, as JSON, in a driver of the cluster; Ray may print warnings beside it."""
        connect = f"ray.init(address={self.address!r}, log_to_driver=False, logging_level='ERROR')"
        script = f"import json, ray; {connect}; print('\\nvalue:', json.dumps({expression}))"
        done = self.command(sys.executable, "-c", script, RAY_AUTH_MODE="token")
        values = [line.removeprefix("value: ") for line in done.stdout.splitlines() if line.startswith("value: ")]
        assert len(values) == 1, done.stdout + done.stderr
        return json.loads(values[0])

    def live(self) -> dict[str, dict[str, float]]:
        """What each live node offers, by address."""
        nodes: list[dict[str, Any]] = self.ask("[node for node in ray.nodes() if node['Alive']]")
        return {node["NodeManagerAddress"]: node["Resources"] for node in nodes}


def tagged(folder: Path) -> list[str]:
    """Command lines of live processes of the cluster."""
    wanted = f"{TAG}={folder}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


def cluster_file(folder: Path) -> tuple[Path, str]:
    """Ours, with the ports and the folder of this test; the address of its head."""
    text = (ROOT / "ops" / "cluster" / "one-machine.yaml").read_text(encoding="utf-8")
    port, client_port = free_port(), free_port()
    for ours, theirs in [
        ("/tmp/turnout-nodes", str(folder / "n")),
        ("127.0.77", NETWORK),
        (":6399", f":{port}"),
        ("--port=6399", f"--port={port}"),
        ("10099", str(client_port)),
        ("turnout-one-machine", "turnout-test"),
    ]:
        assert ours in text, ours
        text = text.replace(ours, theirs)
    (folder / "cluster.yaml").write_text(text, encoding="utf-8")
    return folder / "cluster.yaml", f"{HEAD_IP}:{port}"


@pytest.fixture(scope="session")
def launched() -> Iterator[Launched]:
    folder = Path(tempfile.mkdtemp(prefix="tl-", dir="/tmp"))  # short: Ray puts sockets into it
    for name in ("home/.ray", "tmp"):
        (folder / name).mkdir(parents=True)
    (folder / "home" / ".ray" / "auth_token").write_text("of-this-test-" + "0" * 32)
    file, address = cluster_file(folder)
    cluster = Launched(folder, file, address)
    try:
        up = cluster.command("ray", "up", "--yes", "--no-config-cache", str(file))
        assert up.returncode == 0, up.stdout + up.stderr
        yield cluster
    finally:
        down = cluster.command("ray", "down", "--yes", str(file))
        for name in cluster.nodes.non_terminated_nodes({}):
            cluster.nodes.terminate_node(name)
        shutil.rmtree(folder, ignore_errors=True)
    assert down.returncode == 0, down.stdout + down.stderr
