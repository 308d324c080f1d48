"""Nodes that are processes: their homes, their commands, and that ending one touches nothing else. Without Ray."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from ray.autoscaler._private.util import with_envs

from deployments.local_nodes import TAG, LocalNodes

SLEEPER = "sleep 600 >/dev/null 2>&1 & echo $!"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[LocalNodes]:
    made = LocalNodes({"folder": str(tmp_path / "nodes")}, "a-cluster")
    yield made
    for name in made.non_terminated_nodes({}):
        made.terminate_node(name)


def runner(nodes: LocalNodes, name: str) -> Any:
    return nodes.get_command_runner("", name, {}, "a-cluster", subprocess, use_internal_ip=True)


def is_live(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while is_live(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_live(pid)


def test_nodes_are_found_by_their_tags(nodes: LocalNodes) -> None:
    nodes.create_node({}, {"kind": "head"}, 1)
    nodes.create_node({}, {"kind": "worker"}, 2)
    assert nodes.non_terminated_nodes({"kind": "worker"}) == ["node-2", "node-3"]
    nodes.set_node_tags("node-3", {"status": "up"})
    assert nodes.node_tags("node-3") == {"kind": "worker", "status": "up"}
    assert nodes.internal_ip("node-3") == nodes.external_ip("node-3") == "127.0.77.3"
    nodes.terminate_node("node-2")
    assert nodes.non_terminated_nodes({}) == ["node-1", "node-3"]
    assert nodes.is_terminated("node-2")
    nodes.create_node({}, {}, 1)
    assert nodes.is_running("node-4"), "an address is not given twice"


def test_two_who_know_the_folder_see_the_same_nodes(nodes: LocalNodes) -> None:
    nodes.create_node({}, {"kind": "head"}, 1)
    other = LocalNodes(nodes.provider_config, "a-cluster")
    assert other.non_terminated_nodes({"kind": "head"}) == ["node-1"]


def test_the_folder_goes_with_the_last_node(nodes: LocalNodes, tmp_path: Path) -> None:
    nodes.create_node({}, {}, 2)
    nodes.terminate_nodes(["node-1", "node-2"])
    assert nodes.non_terminated_nodes({}) == []
    assert not (tmp_path / "nodes").exists()


def test_the_folder_is_said_in_full_for_those_with_another_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = LocalNodes.bootstrap_config({"provider": {"folder": "~/nodes"}})
    assert config["provider"]["folder"] == str(tmp_path / "nodes")


def test_a_command_runs_at_home_with_the_address_of_its_node(
    nodes: LocalNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "of somebody else")
    nodes.create_node({}, {}, 1)
    shown = runner(nodes, "node-1").run(
        "echo $PWD $HOME $NODE_IP ${RAY_ADDRESS:-none} $SAID $RAY_OVERRIDE_RESOURCES; which ray",
        with_output=True,
        environment_variables={"SAID": "so", "RAY_OVERRIDE_RESOURCES": {"CPU": 1}},
    )
    home = nodes.home("node-1")
    assert shown == f'{home} {home} 127.0.77.1 none so {{"CPU": 1}}\n{Path(sys.executable).with_name("ray")}\n'


def test_a_command_that_fails_says_where(nodes: LocalNodes) -> None:
    nodes.create_node({}, {}, 1)
    with pytest.raises(click.ClickException, match="node-1: ended with 3: exit 3"):
        runner(nodes, "node-1").run("exit 3")


def test_files_are_copied_and_folders_linked(nodes: LocalNodes, tmp_path: Path) -> None:
    nodes.create_node({}, {}, 1)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("one")
    there = runner(nodes, "node-1")
    for _ in range(2):
        there.run("mkdir -p ~/linked")
        there.run_rsync_up(f"{tmp_path}/folder/", "~/linked/")
        there.run_rsync_up(str(tmp_path / "folder" / "file"), "~/deep/down/copied")
    (tmp_path / "folder" / "file").write_text("two")
    assert there.run("cat ~/linked/file ~/deep/down/copied", with_output=True) == "twoone"
    there.run_rsync_down("~/deep/down/copied", str(tmp_path / "back"))
    assert (tmp_path / "back").read_text() == "one"
    with pytest.raises(click.ClickException, match="must begin with ~/"):
        there.run_rsync_up(str(tmp_path / "back"), "/etc/turnout")


@pytest.mark.parametrize("end", ["terminate", "ray stop", "/some/where/bin/ray stop --force"])
def test_ending_a_node_ends_its_processes_and_no_others(nodes: LocalNodes, end: str) -> None:
    nodes.create_node({}, {}, 2)
    mine = int(runner(nodes, "node-1").run(SLEEPER, with_output=True))
    others = int(runner(nodes, "node-2").run(SLEEPER, with_output=True))
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        if end == "terminate":
            nodes.terminate_node("node-1")
        else:  # as Ray says it, with what it puts in front
            (command,) = with_envs([end], {"RAY_HEAD_IP": "127.0.77.1", "RAY_NODE_TYPE_NAME": "head"})
            runner(nodes, "node-1").run(command)
        assert gone(mine)
        assert is_live(others)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_stopped_head_can_be_started_again(nodes: LocalNodes) -> None:
    """Ray refuses to start where this file and the raylet of a worker, on the same machine here, name one address."""
    nodes.create_node({}, {}, 1)
    runner(nodes, "node-1").run("mkdir ray && echo 127.0.77.1:6399 > ray/ray_current_cluster")
    runner(nodes, "node-1").run("ray stop")
    assert list(nodes.home("node-1").glob("ray/*")) == []


def test_a_process_that_hides_its_environment_ends_with_its_parent(nodes: LocalNodes) -> None:
    """Ray's workers write their title over it."""
    nodes.create_node({}, {}, 1)
    shown = runner(nodes, "node-1").run(
        f"(env -u {TAG} sleep 600 & echo $!; exec sleep 600) >~/pid 2>/dev/null &"
        " while [ ! -s ~/pid ]; do :; done; cat ~/pid",
        with_output=True,
    )
    hidden = int(shown)
    assert is_live(hidden)
    nodes.end_processes("node-1")
    assert gone(hidden)


@pytest.mark.parametrize("command", ["ray stop; ray start --head", "true && ray stop", "ray stop || true"])
def test_ray_stop_among_other_things_is_refused(nodes: LocalNodes, command: str) -> None:
    """It would end every Ray process of this machine."""
    nodes.create_node({}, {}, 1)
    with pytest.raises(click.ClickException, match="must be a command of its own"):
        runner(nodes, "node-1").run(command)


def test_the_caller_is_never_ended(nodes: LocalNodes) -> None:
    nodes.create_node({}, {}, 1)
    script = (
        "import sys; from deployments.local_nodes import LocalNodes;"
        f"LocalNodes({nodes.provider_config!r}, 'x').terminate_node('node-1'); print('alive')"
    )
    command = ["env", f"{TAG}={nodes.tag('node-1')}", sys.executable, "-c", script]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert shown.stdout == "alive\n"
