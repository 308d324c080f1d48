"""A cluster of two raylets, processes of this machine, with the demo pair in actors on both of them."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from ray.autoscaler._private.providers import _get_node_provider

from ops.chaos import kit
from turnout.free_ports import free_port, free_ports

ROOT = Path(__file__).parents[2]
# As a cluster file names it (ops/cluster/one-machine.yaml), and `ray up` finds it.
PROVIDER = "deployments.local_nodes.LocalNodes"
HEAD, WORKER = "node-1", "node-2"
TOKEN = "of-this-chaos-run-" + "0" * 32
COMMON = (
    "--dashboard-agent-listen-port=0 --min-worker-port=0 --max-worker-port=0 --object-store-memory=80000000"
    " --node-ip-address=$NODE_IP --disable-usage-stats"
)


class TwoNodes:
    """The head has the draft model, the other node the target; the rest lies where Ray puts it.

    Args:
        network: first three numbers of the nodes' loopback addresses, this cluster's alone.
        config: a served configuration as plain values; ports are added.
    """

    def __init__(self, network: str, config: dict[str, Any]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tc-", dir="/tmp"))  # short: Ray puts sockets into it
        provider = {"type": "external", "module": PROVIDER, "folder": str(self.folder / "n"), "network": network}
        self.nodes = _get_node_provider(provider, "turnout-chaos", use_cache=False)
        self._port, self.grpc_port, self.http_port = free_ports(3)
        self._config = {**config, "server": {**config.get("server", {}), **self._ports()}}

    def _ports(self) -> dict[str, int]:
        return {"grpc_port": self.grpc_port, "http_port": self.http_port}

    @property
    def http(self) -> str:
        """Where HTTP answers."""
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc(self) -> str:
        """Where gRPC answers."""
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def tag(self) -> str:
        """What the chaos kit knows this cluster's processes by."""
        return str(self.folder / "n")

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process of both nodes, and remove what they wrote."""
        for name in self.nodes.non_terminated_nodes({}):
            self.nodes.terminate_node(name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        self.nodes.create_node({}, {}, 2)
        token = self.folder / "token"
        token.write_text(TOKEN)
        for name in (HEAD, WORKER):
            runner = self.nodes.get_command_runner("", name, {}, "", None, use_internal_ip=True)
            runner.run_rsync_up(str(ROOT / "ops"), "~/ops")
            runner.run_rsync_up(str(token), "~/.ray/auth_token")
        self.start_head()
        self.start_worker()

    def start_head(self) -> None:
        """Start the head, the first time or again: what the cluster is lies in its folder, in RocksDB."""
        self._run(
            HEAD,
            "mkdir -p ~/gcs; RAY_gcs_storage=rocksdb RAY_gcs_storage_path=$HOME/gcs"
            f" ray start --head --port={self._port} --temp-dir=$HOME/ray --include-dashboard=false"
            f" --ray-client-server-port={free_port()} --num-cpus=3 --resources='{{\"draft\": 1}}' {COMMON}",
        )

    def start_worker(self) -> None:
        """Start the other node, the first time or again."""
        address = f"{self.nodes.internal_ip(HEAD)}:{self._port}"
        self._run(WORKER, f"ray start --address={address} --num-cpus=3 --resources='{{\"target\": 1}}' {COMMON}")

    def serve(self) -> None:
        """Deploy, with the command that people use."""
        file = self.folder / "serve.yaml"
        file.write_text(yaml.safe_dump(self._config), encoding="utf-8")
        address = f"{self.nodes.internal_ip(HEAD)}:{self._port}"
        self._run(HEAD, f"turnout serve {file} --cluster {address}")

    def _run(self, node: str, command: str) -> None:
        runner = self.nodes.get_command_runner("", node, {}, "", None, use_internal_ip=True)
        runner.run(f". ~/ops/cluster/environment.sh; {command} >> out 2>&1")

    def lose_head(self) -> None:
        """Kill all of the head's processes at once and start it again: another raylet, the same storage."""
        self._stop(HEAD)
        self.start_head()

    def lose_worker(self) -> None:
        """Kill all of the other node's processes at once and start it again."""
        self._stop(WORKER)
        self.start_worker()

    def _stop(self, node: str) -> None:
        # To these nodes it is kill -9 of everything, at once.
        self.nodes.get_command_runner("", node, {}, "", None, use_internal_ip=True).run("ray stop")

    def parts(self) -> dict[str, int]:
        """How many live processes there are of each part."""
        counts: dict[str, int] = {}
        for each in kit.processes(self.tag):
            if each.part is not None:
                counts[each.part] = counts.get(each.part, 0) + 1
        return counts

    def held(self) -> dict[str, int]:
        """What the replicas and their actors still hold, summed; all zero when idle.

        Raises:
            OSError: the server does not answer.
        """
        sums = dict.fromkeys(("replicas", "requests", "sequences", "used_blocks", "waiting"), 0)
        for replica in (each for pool in kit.status(self.http).values() for each in pool):
            sums["replicas"] += 1
            for name in ("requests", "sequences", "used_blocks", "waiting"):
                sums[name] += replica[name]
        return sums


def until(condition: Callable[[], bool], what: str, timeout_s: float, pause_s: float = 0.5) -> float:
    """Wait for something; an error of the network counts as not yet.

    Returns:
        Seconds it took.

    Raises:
        TimeoutError: it did not come; `what` is named.
    """
    started = time.monotonic()
    while True:
        with suppress(OSError, kit.Missing, subprocess.SubprocessError, ValueError):
            if condition():
                return time.monotonic() - started
        if time.monotonic() - started > timeout_s:
            raise TimeoutError(f"not in {timeout_s:.0f} s: {what}")
        time.sleep(pause_s)
