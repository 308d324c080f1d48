#!/usr/bin/env python3
"""Breaks one part of a cluster on purpose: `python ops/chaos/kit.py kill draft`. Standard library only; Linux.

Parts are looked for among this machine's processes, or among those of one node that `deployments.local_nodes` started
(`--node FOLDER:NODE`, or FOLDER alone for all its nodes). What you will see: ops/runbooks/chaos.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TAG = "TURNOUT_LOCAL_NODE"  # as in deployments/local_nodes.py
STATUS_TIMEOUT_S = 10.0
IP_S = 10.0  # that `ip` may take
# How a process is known by what Ray writes over its command line.
TITLES = {
    "controller": "ray::ServeController",
    "proxy": "ray::ProxyActor",
    "ingress": "ray::ServeReplica:turnout:ingress",
    "replica": "ray::ServeReplica:turnout:pool-",
    "actor": "ray::ModelActor",
    "gcs": "gcs_server",
    "raylet": "raylet",
}
# Which member of a pool: its process is what GET /status says.
ROLES = {"draft": 0, "target": 1}
PARTS = (*ROLES, *TITLES, "head")


@dataclass(frozen=True)
class Process:
    """A live process: its parent and the words of its command line."""

    pid: int
    parent: int
    words: tuple[str, ...]

    @property
    def part(self) -> str | None:
        """Which part of a cluster it is; None: none that can be named."""
        if not self.words:
            return None
        name = Path(self.words[0]).name
        for part, title in TITLES.items():
            if (self.words[0].startswith(title) and title.startswith("ray::")) or name == title:
                return part
        return None


class Missing(Exception):  # noqa: N818  (the machine is in order; the wish is not)
    """There is no process of that kind here."""


def processes(node: str | None = None) -> list[Process]:
    """Live processes that this user may look into.

    Args:
        node: "FOLDER:NODE" or "FOLDER" of `deployments.local_nodes`; None: of the whole machine.
    """
    found, tagged = {}, set()
    wanted = None if node is None else f"{TAG}={node}"
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state in "ZX":
                continue
            words = tuple((folder / "cmdline").read_bytes().rstrip(b"\0").decode(errors="replace").split("\0"))
            pid = int(folder.name)
            found[pid] = Process(pid, int(parent), words)
            entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            if wanted is None or any(entry == wanted or entry.startswith(f"{wanted}:") for entry in entries):
                tagged.add(pid)
    if wanted is None:
        return [each for pid, each in sorted(found.items()) if pid != os.getpid()]
    # Ray's titles are written over the environment: children of what is known belong to it too.
    while more := {pid for pid, each in found.items() if each.parent in tagged} - tagged:
        tagged |= more
    return [found[pid] for pid in sorted(tagged - {os.getpid()}) if pid in found]


def find(part: str, node: str | None = None, http: str | None = None) -> list[int]:
    """Ids of the processes of a part.

    Args:
        part: one of `PARTS`.
        node: as for `processes`.
        http: "http://HOST:PORT" of the server, which knows which process has which model; for draft and target.

    Raises:
        Missing: there is none.
    """
    here = processes(node)
    if part in ROLES:
        if http is None:
            raise Missing(f"{part}: the server says where it runs; give --http")
        pids = members(http)[part]
        found = [each.pid for each in here if each.pid in pids]
    else:
        parts = ("gcs", "raylet") if part == "head" else (part,)
        found = [each.pid for each in here if each.part in parts]
    if not found:
        raise Missing(f"no {part} among {len(here)} processes here")
    return found


def status(http: str) -> dict[str, list[dict[str, Any]]]:
    """What GET /status says of each replica of each pool.

    Raises:
        OSError: nothing answers.
    """
    with urllib.request.urlopen(f"{http}/status", timeout=STATUS_TIMEOUT_S) as answer:
        pools: dict[str, list[dict[str, Any]]] = json.load(answer)["pools"]
        return pools


def members(http: str) -> dict[str, set[int]]:
    """Processes of the small and the large models of all pools. A place is "ADDRESS pid NUMBER"."""
    found: dict[str, set[int]] = {role: set() for role in ROLES}
    for replica in (each for pool in status(http).values() for each in pool):
        for role, place in ROLES.items():
            if len(replica["members"]) > place and "pid " in replica["members"][place]["place"]:
                found[role].add(int(replica["members"][place]["place"].rpartition("pid ")[2].split()[0]))
    return found


def send(pids: list[int], what: signal.Signals) -> None:
    """Send a signal to each; what has ended meanwhile is passed over."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, what)


def pause(pids: list[int], seconds: float) -> None:
    """Send SIGSTOP, and SIGCONT after `seconds`, also when interrupted."""
    send(pids, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        send(pids, signal.SIGCONT)


def lose(node: str, timeout_s: float = 20.0) -> int:
    """End every process of a node at once, as if it were switched off.

    Returns:
        How many there were.

    Raises:
        TimeoutError: some are still there.
    """
    deadline, lost = time.monotonic() + timeout_s, set()
    while pids := [each.pid for each in processes(node)]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{node}: processes {pids} do not end")
        lost.update(pids)
        send(pids, signal.SIGKILL)
        time.sleep(0.05)
    return len(lost)


@dataclass(frozen=True)
class Namespace:
    """A network namespace whose only way out is one cable, which can be pulled. Needs root and `ip`.

    Attributes:
        name: at most 9 characters, unique on this machine.
        network: first three numbers of the cable's addresses: this machine has .1, the namespace .2.
    """

    name: str
    network: str

    @property
    def outside(self) -> str:
        """This machine's address on the cable: a head that the node is to join listens there."""
        return f"{self.network}.1"

    @property
    def inside(self) -> str:
        """The node's address."""
        return f"{self.network}.2"

    def make(self) -> None:
        """Make the namespace and the cable.

        Raises:
            Missing: this machine does not allow it; the message says what it answered.
        """
        cable = (f"{self.name}-o", f"{self.name}-i")
        self._ip("netns", "add", self.name)
        try:
            self._ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1], "netns", self.name)
            self._ip("address", "add", f"{self.outside}/24", "dev", cable[0])
            self._ip("link", "set", cable[0], "up")
            self._ip("-n", self.name, "address", "add", f"{self.inside}/24", "dev", cable[1])
            self._ip("-n", self.name, "link", "set", cable[1], "up")
            self._ip("-n", self.name, "link", "set", "lo", "up")
        except Missing:
            self.remove()
            raise

    def run(self, *words: str) -> list[str]:
        """The command that runs another one inside, e.g. `ray start --address=... --node-ip-address=<inside>`."""
        return ["ip", "netns", "exec", self.name, *words]

    def cut(self) -> None:
        """Pull the cable: packets vanish, connections stay open on both sides."""
        self._ip("link", "set", f"{self.name}-o", "down")

    def mend(self) -> None:
        """Put it in again."""
        self._ip("link", "set", f"{self.name}-o", "up")

    def remove(self) -> None:
        """Remove both; processes inside are not ended."""
        for words in (("link", "delete", f"{self.name}-o"), ("netns", "delete", self.name)):
            with suppress(Missing):
                self._ip(*words)

    def _ip(self, *words: str) -> None:
        try:
            done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=IP_S, check=False)
        except FileNotFoundError:
            raise Missing("this machine has no `ip` (package iproute2)") from None
        except subprocess.TimeoutExpired:
            raise Missing(f"ip {' '.join(words)}: did not end in {IP_S:g} s") from None
        if done.returncode:
            raise Missing(f"ip {' '.join(words)}: {done.stderr.strip()} (this needs root)")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    for action, text in (("list", "show the parts"), ("kill", "kill -9"), ("pause", "SIGSTOP, later SIGCONT")):
        command = actions.add_parser(action, help=text)
        if action != "list":
            command.add_argument("part", choices=PARTS)
            command.add_argument("--http", default="http://127.0.0.1:8000", help="of the server")
        command.add_argument("--node", help="FOLDER:NODE of deployments.local_nodes; absent: this machine")
        if action == "pause":
            command.add_argument("--seconds", type=float, default=5.0)
    actions.add_parser("lose", help="end all processes of a node").add_argument("node", help="FOLDER:NODE")
    for action in ("make", "cut", "mend", "remove"):
        command = actions.add_parser(f"net-{action}", help=f"{action} a network namespace of a node")
        command.add_argument("name")
        command.add_argument("--network", default="10.77.7")
    return parser


def _do(chosen: argparse.Namespace) -> str:
    if chosen.action == "list":
        return "\n".join(f"{each.pid} {each.part}" for each in processes(chosen.node) if each.part) or "nothing"
    if chosen.action == "lose":
        return f"ended {lose(chosen.node)} processes"
    if chosen.action.startswith("net-"):
        net = Namespace(chosen.name, chosen.network)
        getattr(net, chosen.action.removeprefix("net-"))()
        return f"{chosen.action} {net.name}: {net.outside} -- {net.inside}"
    pids = find(chosen.part, chosen.node, chosen.http)
    if chosen.action == "kill":
        send(pids, signal.SIGKILL)
    else:
        pause(pids, chosen.seconds)
    return f"{chosen.action} {chosen.part}: {pids}"


def main() -> int:
    """Do one thing, and say what was done."""
    try:
        said = _do(_parser().parse_args())
    except (Missing, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{said}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
