"""`ray up`, `turnout serve --cluster`, `turnout status` and `ray down`, for real, on nodes that are processes.

The tests of this file follow one another: each finds the cluster as the one before left it.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler.tags import NODE_KIND_UNMANAGED, TAG_RAY_NODE_KIND

from tests.launch.conftest import HEAD_IP, NETWORK, ROOT, Launched, poll, tagged
from turnout.client import Client
from turnout.errors import TurnoutError
from turnout.free_ports import free_port

pytestmark = pytest.mark.launch


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    return free_port(), free_port()


@pytest.fixture(scope="module")
def served(launched: Launched, ports: tuple[int, int]) -> Path:
    """Our example configuration with ports of this test."""
    values = yaml.safe_load((ROOT / "ops" / "cluster" / "one-machine-serve.yaml").read_text(encoding="utf-8"))
    values["server"] = {"grpc_port": ports[0], "http_port": ports[1]}
    path = launched.folder / "serve.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def serve(launched: Launched, *options: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, output and error of `turnout serve`, run at this machine's prompt."""
    # Not in the checkout: Ray lets all processes of a driver import from the folder that it runs in.
    done = launched.command("turnout", "serve", *options, cwd=launched.folder, **environment)
    return done.returncode, done.stdout, done.stderr


def test_ray_up_starts_the_head_and_the_workers_it_should_begin_with(launched: Launched) -> None:
    poll(lambda: set(launched.live()) == {HEAD_IP, f"{NETWORK}.2"}, "a worker joins", 120)
    offers = launched.live()
    assert "CPU" not in offers[HEAD_IP]
    assert (offers[f"{NETWORK}.2"]["CPU"], offers[f"{NETWORK}.2"]["draft"]) == (2, 1)


def test_a_wrong_token_is_said_at_once(launched: Launched, served: Path) -> None:
    code, _, error = serve(launched, str(served), "--cluster", launched.address, RAY_AUTH_TOKEN="wrong" * 8)
    assert code == 1
    assert f"the cluster at {launched.address} refuses the token of this process" in error
    assert "RAY_AUTH_TOKEN" in error
    assert error.count("\n") == 1
    script = (
        "import time; from deployments.cluster import connect; from turnout.errors import TurnoutError\n"
        f"started = time.monotonic()\ntry: connect({launched.address!r})\n"
        "except TurnoutError: print(time.monotonic() - started)"
    )
    asked = launched.command(sys.executable, "-c", script, RAY_AUTH_TOKEN="wrong" * 8)
    assert float(asked.stdout) < 10, "Ray itself takes 20 s"


def test_no_token_is_said_at_once(launched: Launched, served: Path, tmp_path: Path) -> None:
    code, _, error = serve(launched, str(served), "--cluster", launched.address, HOME=str(tmp_path))
    assert code == 1
    assert "refuses the token of this process, or it has none" in error


def test_an_address_without_a_cluster_is_said_at_once(launched: Launched, served: Path) -> None:
    address = f"{HEAD_IP}:{free_port()}"
    code, _, error = serve(launched, str(served), "--cluster", address)
    assert code == 1
    assert f"no cluster answers at {address}" in error


def test_what_no_node_can_ever_host_is_refused(launched: Launched, served: Path) -> None:
    values: dict[str, Any] = yaml.safe_load(served.read_text(encoding="utf-8"))
    values["pools"]["demo"]["placement"]["resources"]["large"] = {"target": 2}
    path = launched.folder / "large.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    code, _, error = serve(launched, str(path), "--cluster", launched.address)
    assert code == 1
    assert "pool 'demo' needs a node with {CPU: 0.5, target: 2}" in error
    assert "target: 1" in error, "what the autoscaler could add is named"


def test_a_node_with_other_code_is_refused_by_name(launched: Launched, served: Path) -> None:
    """A node of its own, unknown to the autoscaler, whose Python finds another state of the sources first."""
    other = launched.folder / "other"
    for package in ("turnout", "actors", "decoding", "deployments", "engine", "kvstore", "router", "training"):
        shutil.copytree(ROOT / package, other / package, ignore=shutil.ignore_patterns("*.safetensors", "__pycache__"))
    with (other / "turnout" / "cost.py").open("a", encoding="utf-8") as source:
        source.write("\n# changed\n")
    nodes = launched.nodes
    before = set(nodes.non_terminated_nodes({}))
    nodes.create_node({}, {TAG_RAY_NODE_KIND: NODE_KIND_UNMANAGED}, 1)
    (name,) = set(nodes.non_terminated_nodes({})) - before
    runner = nodes.get_command_runner("", name, {}, "", None, use_internal_ip=True)
    runner.run_rsync_up(str(ROOT / "ops"), "~/ops")
    runner.run_rsync_up(str(launched.folder / "home" / ".ray" / "auth_token"), "~/.ray/auth_token")
    start = yaml.safe_load(launched.file.read_text(encoding="utf-8"))["worker_start_ray_commands"][1]
    try:
        runner.run(f"export RAY_HEAD_IP={HEAD_IP} PYTHONPATH={other}; {start} --num-cpus=1")
        code, _, error = serve(launched, str(served), "--cluster", launched.address)
        assert code == 1
        assert f"node {nodes.internal_ip(name)} has sources of Turnout, others than this one" in error
    finally:
        nodes.terminate_node(name)
    poll(lambda: nodes.internal_ip(name) not in launched.live(), "the node is gone", 60)


def test_serve_adds_the_node_it_needs_and_stays_when_the_command_returns(launched: Launched, served: Path) -> None:
    done = launched.execute(f"turnout serve {served} --cluster {launched.address}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pool 'demo' waits for nodes that the autoscaler adds" in done.stdout
    assert "serving demo" in done.stdout
    assert any("target" in offer for offer in launched.live().values())


def test_what_is_served_answers(launched: Launched, ports: tuple[int, int]) -> None:
    with Client(f"127.0.0.1:{ports[0]}") as client:
        result = client.generate("2 + 2 =", max_tokens=8, temperature=0.0)
    assert result.usage.completion_tokens > 0
    assert {token.source for token in result.tokens} <= {"demo-small", "demo-large"}


def test_status_shows_where_the_models_run(launched: Launched, ports: tuple[int, int]) -> None:
    where = ("--address", f"127.0.0.1:{ports[0]}", "--http", f"http://127.0.0.1:{ports[1]}")
    shown = launched.command("turnout", "status", *where)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    told = json.loads(launched.command("turnout", "status", *where, "--json").stdout)
    (replica,) = told["pools"]["demo"]
    members = {member["model"]: member for member in replica["members"]}
    assert set(members) == {"demo-small", "demo-large"}
    offers = launched.live()
    for model, resource in [("demo-small", "draft"), ("demo-large", "target")]:
        (address,) = re.findall(rf"{re.escape(NETWORK)}\.\d+", members[model]["place"])
        assert resource in offers[address]
        assert members[model]["restarts"] == 0
        assert members[model]["place"] in shown.stdout


def test_a_head_that_is_started_again_finds_its_nodes_and_what_they_serve(
    launched: Launched, ports: tuple[int, int]
) -> None:
    before = set(launched.live())
    again = launched.command("ray", "up", "--yes", "--no-config-cache", "--restart-only", str(launched.file))
    assert again.returncode == 0, again.stdout + again.stderr

    def answers() -> bool:
        try:
            with Client(f"127.0.0.1:{ports[0]}") as client:
                result = client.generate("2 + 2 =", max_tokens=4, temperature=0.0, deadline_s=20)
        except TurnoutError:
            return False
        return result.usage.completion_tokens > 0

    poll(answers, "the application answers", 240)
    poll(lambda: set(launched.live()) == before, "the same nodes are there", 120)


def test_serving_again_replaces_what_is_there(launched: Launched, served: Path, ports: tuple[int, int]) -> None:
    code, said, error = serve(launched, str(served), "--cluster", launched.address)
    assert code == 0, error
    assert "waits for" not in said
    with Client(f"127.0.0.1:{ports[0]}") as client:
        assert client.generate("2 + 2 =", max_tokens=4).usage.completion_tokens > 0


def test_other_ports_are_refused_while_serve_listens(launched: Launched, served: Path, ports: tuple[int, int]) -> None:
    path = launched.folder / "ports.yaml"
    for name, port in zip(("grpc_port", "http_port"), ports, strict=True):
        values: dict[str, Any] = yaml.safe_load(served.read_text(encoding="utf-8"))
        values["server"][name] = free_port()
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        code, _, error = serve(launched, str(path), "--cluster", launched.address)
        assert code == 1
        assert f"server.{name}: Serve listens on {port} on this cluster already" in error


def test_stop_ends_the_application_and_leaves_the_cluster(launched: Launched, ports: tuple[int, int]) -> None:
    assert serve(launched, "--cluster", launched.address, "--stop")[:2] == (0, "stopped\n")
    assert serve(launched, "--cluster", launched.address, "--stop")[:2] == (0, "nothing was served\n")
    assert HEAD_IP in launched.live()


def test_ray_down_leaves_nothing_behind(launched: Launched) -> None:
    assert tagged(launched.folder) != []
    down = launched.command("ray", "down", "--yes", str(launched.file))
    assert down.returncode == 0, down.stdout + down.stderr
    assert tagged(launched.folder) == []
    assert not (launched.folder / "n").exists()
