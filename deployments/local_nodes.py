"""Ray nodes that are processes of this machine: `ray up` without a cloud, ssh or root.

Each node has a home folder and a loopback address of its own; its commands run there. For trying a cluster file and
for tests; Linux only. A cluster file names it as its provider, of type external; ops/cluster/one-machine.yaml is one.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
from ray.autoscaler.command_runner import CommandRunnerInterface
from ray.autoscaler.node_provider import NodeProvider

NETWORK = "127.0.77"
TAG = "TURNOUT_LOCAL_NODE"  # in the environment of every process of a node: "<folder>:<node id>"
STOP_TIMEOUT_S = 20.0
EMPTY_LOOKS = 2  # one may miss a process that is just becoming another program: it has no environment then
EXPORTS = re.compile(r"^(\s*export \w+=\S*;)*\s*")
RAY_STOP = re.compile(r"(?:\S*/)?ray stop(?: --?[\w=-]+)*\s*")

State = dict[str, Any]


class LocalNodes(NodeProvider):  # type: ignore[misc]
    """Nodes of one cluster. Their list is a file under a lock: `ray up` and the head's autoscaler both work on it.

    Configured by `folder` (of everything it keeps; made when needed, gone with the last node; short, because Ray puts
    sockets into it) and `network` (the first three numbers of the nodes' addresses).
    """

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._folder = Path(provider_config["folder"])
        self._network = provider_config.get("network", NETWORK)

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        """Say where the folder is in a way that does not depend on who reads it: every node has its own home."""
        provider = cluster_config["provider"]
        provider["folder"] = str(Path(provider["folder"]).expanduser().resolve())
        return cluster_config

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        """Ids of the nodes that have all these tags."""
        with self._state() as state:
            return [name for name, node in state["nodes"].items() if tag_filters.items() <= node["tags"].items()]

    def is_running(self, node_id: str) -> bool:
        """Whether it was created and not terminated."""
        with self._state() as state:
            return node_id in state["nodes"]

    def is_terminated(self, node_id: str) -> bool:
        """Whether it is no more."""
        return not self.is_running(node_id)

    def node_tags(self, node_id: str) -> dict[str, str]:
        """Its tags; none of a node that is no more."""
        with self._state() as state:
            tags: dict[str, str] = state["nodes"].get(node_id, {"tags": {}})["tags"]
            return tags

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        """Add tags, or give them other values."""
        with self._state() as state:
            if node_id in state["nodes"]:
                state["nodes"][node_id]["tags"].update(tags)

    def internal_ip(self, node_id: str) -> str:
        """Its loopback address."""
        return f"{self._network}.{node_id.rpartition('-')[2]}"

    def external_ip(self, node_id: str) -> str:
        """The same: it cannot be reached from other machines."""
        return self.internal_ip(node_id)

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> None:
        """Make empty homes. Processes come with the commands that Ray sends there."""
        with self._state(create=True) as state:
            for _ in range(count):
                state["last"] += 1
                name = f"node-{state['last']}"
                self.home(name).mkdir(mode=0o700, parents=True)
                state["nodes"][name] = {"tags": dict(tags)}

    def terminate_node(self, node_id: str) -> None:
        """End its processes and remove its home; the cluster's folder goes with the last node."""
        self.end_processes(node_id)
        with self._state() as state:
            state["nodes"].pop(node_id, None)
            shutil.rmtree(self.home(node_id), ignore_errors=True)
            if not state["nodes"]:
                shutil.rmtree(self._folder, ignore_errors=True)

    def get_command_runner(
        self,
        log_prefix: str,
        node_id: str,
        auth_config: dict[str, Any],
        cluster_name: str,
        process_runner: Any,
        use_internal_ip: bool,
        docker_config: dict[str, Any] | None = None,
    ) -> LocalCommands:
        """What runs commands on a node."""
        return LocalCommands(self, node_id)

    def home(self, node_id: str) -> Path:
        """Its home folder."""
        return self._folder / node_id

    def tag(self, node_id: str) -> str:
        """What its processes carry in their environment."""
        return f"{self._folder}:{node_id}"

    def end_processes(self, node_id: str) -> None:
        """Kill all its processes, as if the machine were switched off; others of this machine are left alone.

        Raises:
            TimeoutError: some are still there.
        """
        deadline, empty = time.monotonic() + STOP_TIMEOUT_S, 0
        while empty < EMPTY_LOOKS:
            pids = _processes(self.tag(node_id))
            empty = 0 if pids else empty + 1
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{node_id}: processes {pids} do not end")
            time.sleep(0.05)

    @contextmanager
    def _state(self, create: bool = False) -> Iterator[State]:
        """The list of nodes, held alone; what is changed in it is written back."""
        if create:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif not self._folder.exists():
            yield {"last": 0, "nodes": {}}
            return
        with (self._folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            file = self._folder / "nodes.json"
            before = file.read_text(encoding="utf-8") if file.exists() else ""
            state = json.loads(before) if before else {"last": 0, "nodes": {}}
            yield state
            after = json.dumps(state)
            if after != before and self._folder.exists():
                file.write_text(after, encoding="utf-8")


class LocalCommands(CommandRunnerInterface):  # type: ignore[misc]
    """Runs commands in a node's home, with its address in $NODE_IP and this Python's tools on the path."""

    def __init__(self, nodes: LocalNodes, node_id: str) -> None:
        self._nodes = nodes
        self._node_id = node_id

    def run(
        self,
        cmd: str | None = None,
        timeout: int = 120,
        exit_on_fail: bool = False,
        port_forward: list[tuple[int, int]] | None = None,
        with_output: bool = False,
        environment_variables: dict[str, object] | None = None,
        run_env: str = "auto",
        ssh_options_override_ssh_key: str = "",
        shutdown_after_run: bool = False,
    ) -> str:
        """Run a shell command until it ends; what it leaves in the background stays.

        There is no deadline: over ssh too Ray's `timeout` is that of connecting, and `turnout serve --wait` stays.

        `ray stop`, which would end every Ray process of this machine, ends the node's own ones.

        Raises:
            ClickException: it failed, or says `ray stop` among other things.
        """
        command = EXPORTS.sub("", cmd or "true", count=1)
        if RAY_STOP.fullmatch(command):
            self._nodes.end_processes(self._node_id)
            for address in self._nodes.home(self._node_id).glob("*/ray_current_cluster"):
                address.unlink()  # as `ray stop` does: a head that is started again would take it for a running one
            return ""
        if re.search(r"\bray stop\b", command):
            raise click.ClickException(f"{self._node_id}: `ray stop` must be a command of its own: {command}")
        # A pipe would stay open in what runs on in the background.
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            code = subprocess.run(
                ["bash", "-c", cmd or "true"],
                env=self._environment(environment_variables or {}),
                cwd=self._nodes.home(self._node_id),
                stdin=subprocess.DEVNULL,
                stdout=output if with_output else None,
                start_new_session=True,
                check=False,
            ).returncode
            if code:
                raise click.ClickException(f"{self._node_id}: ended with {code}: {cmd}")
            output.seek(0)
            return output.read()

    def run_rsync_up(self, source: str, target: str, options: dict[str, Any] | None = None) -> None:
        """Bring a file to the node as a copy, a folder as a link: what either side changes in it, both see."""
        place, origin = self._place(target), Path(source).expanduser().resolve()
        place.parent.mkdir(parents=True, exist_ok=True)
        if not origin.is_dir():
            shutil.copy2(origin, place)
            return
        if place.is_symlink():
            place.unlink()
        elif place.is_dir():
            place.rmdir()  # Ray makes an empty one first
        place.symlink_to(origin)

    def run_rsync_down(self, source: str, target: str, options: dict[str, Any] | None = None) -> None:
        """Copy a file or folder from the node."""
        place = self._place(source)
        if place.is_dir():
            shutil.copytree(place, target, dirs_exist_ok=True)
        else:
            shutil.copy2(place, target)

    def run_init(self, *, as_head: bool, file_mounts: dict[str, str], sync_run_yet: bool) -> None:
        """Nothing has to be prepared."""

    def remote_shell_command_str(self) -> str:
        """How to get a shell there."""
        return f"cd {self._nodes.home(self._node_id)} && HOME=$PWD bash"

    def _place(self, path: str) -> Path:
        """A path as the node says it; its home is all that it has of this machine's files."""
        if not path.startswith("~/"):
            raise click.ClickException(f"{self._node_id}: {path!r} must begin with ~/")
        return self._nodes.home(self._node_id) / path.removeprefix("~/")

    def _environment(self, more: dict[str, object]) -> dict[str, str]:
        # What Ray set for the process that asks for this is not the node's.
        inherited = os.environ.items()  # noqa: TID251 - what a command inherits
        environment = {name: value for name, value in inherited if not name.startswith("RAY_")}
        tools = str(Path(sys.executable).parent)
        return {
            **environment,
            **{name: value if isinstance(value, str) else json.dumps(value) for name, value in more.items()},
            "HOME": str(self._nodes.home(self._node_id)),
            "PATH": os.pathsep.join([tools, environment.get("PATH", os.defpath)]),
            "NODE_IP": self._nodes.internal_ip(self._node_id),
            TAG: self._nodes.tag(self._node_id),
        }


def _processes(tag: str) -> list[int]:
    """Live processes with this tag, and their descendants, which may have overwritten theirs with a title."""
    wanted = f"{TAG}={tag}".encode()
    parents: dict[int, int] = {}
    found: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state in "ZX":
                continue
            parents[int(folder.name)] = int(parent)
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
    grown = True
    while grown:
        children = {pid for pid, parent in parents.items() if parent in found} - found
        grown = bool(children)
        found |= children
    return sorted(found - {os.getpid()})
