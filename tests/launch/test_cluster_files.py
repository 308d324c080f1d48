"""The cluster files as Ray reads them, without a cloud, and against what we serve on them."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from actors.placement import bundles, check_hosts
from deployments.local_nodes import LocalNodes
from turnout.config import load_config

ROOT = Path(__file__).parents[2]
AWS = ROOT / "cluster.yaml"
OURS = ROOT / "ops" / "cluster" / "one-machine.yaml"
HARDWARE = ROOT / "ops" / "cluster" / "on-premises.yaml"
FILES = [AWS, OURS, HARDWARE]
ENVIRONMENT = ROOT / "ops" / "cluster" / "environment.sh"
SERVED = {AWS: ROOT / "ops" / "cluster-serve.yaml", OURS: ROOT / "ops" / "cluster" / "one-machine-serve.yaml"}


def read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return values


def start_line(values: dict[str, Any], role: str) -> str:
    (line,) = [line for line in values[f"{role}_start_ray_commands"] if "ray start" in line]
    return str(line)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_ray_accepts_the_cluster_file(path: Path) -> None:
    prepared = prepare_config(read(path))
    validate_config(prepared)
    assert prepared["head_node_type"] in prepared["available_node_types"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
@pytest.mark.parametrize("fault", [{"max_worker": 1}, {"setup_commands": "make"}, {"max_workers": "many"}])
def test_ray_refuses_a_misspelt_cluster_file(path: Path, fault: dict[str, Any]) -> None:
    with pytest.raises((jsonschema.ValidationError, TypeError)):
        validate_config(prepare_config(copy.deepcopy(read(path)) | fault))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
@pytest.mark.parametrize("role", ["head", "worker"])
def test_every_node_starts_ray_in_the_environment_of_the_cluster(path: Path, role: str) -> None:
    values = read(path)
    line = start_line(values, role)
    assert re.match(r"\. ~/(?:turnout/)?ops/cluster/environment\.sh;", line)
    assert ("RAY_gcs_storage=rocksdb RAY_gcs_storage_path=$HOME/" in line) == (role == "head")
    assert ("--temp-dir=" in line) == (role == "head")
    assert ("--head" in line) == (role == "head")
    if path != OURS:
        assert "--metrics-export-port=8090" in line
        assert "~/turnout/.venv/bin/ray start" in line
    assert [each for each in values[f"{role}_start_ray_commands"] if each.endswith("ray stop")] != []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_node_has_the_secret_of_the_cluster(path: Path) -> None:
    assert read(path)["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"


@pytest.mark.parametrize("path", SERVED, ids=lambda path: path.name)
def test_the_nodes_can_host_what_is_served_on_them(path: Path) -> None:
    values, config = read(path), load_config(SERVED[path])
    types = values["available_node_types"]
    offers = [{k: float(v) for k, v in each["resources"].items()} for n, each in types.items() if n != "head"]
    for name, pool in config.pools.items():
        check_hosts(name, bundles(pool, config), offers)
        most = pool.autoscaling.max_replicas if pool.autoscaling else pool.replicas
        for role in ("draft", "target"):
            assert types[role]["max_workers"] * types[role]["resources"][role] >= most
    assert sum(each["max_workers"] for each in types.values()) <= values["max_workers"]
    assert types["head"]["resources"] == {"CPU": 0}


def test_workers_in_the_cloud_are_spot_instances_with_gpus_and_the_head_is_neither() -> None:
    types = read(AWS)["available_node_types"]
    for role in ("draft", "target"):
        assert types[role]["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
        assert types[role]["resources"]["GPU"] == types[role]["resources"][role] == 1
        assert types[role]["labels"] == {"turnout.role": role}
    assert "InstanceMarketOptions" not in types["head"]["node_config"]


def test_one_machine_has_the_node_types_of_the_cloud() -> None:
    assert read(OURS)["available_node_types"].keys() == read(AWS)["available_node_types"].keys()
    assert read(OURS)["provider"]["module"] == f"{LocalNodes.__module__}.{LocalNodes.__qualname__}"


def test_on_premises_says_how_to_get_round_the_fault_of_the_newer_autoscaler() -> None:
    """Head and workers share a node type there, which is what that autoscaler counts wrongly."""
    prepared = prepare_config(read(HARDWARE))
    assert list(prepared["available_node_types"]) == [prepared["head_node_type"]]
    commands = [
        line for line in HARDWARE.read_text(encoding="utf-8").splitlines() if re.search(r"ray (up|down) ", line)
    ]
    assert len(commands) == 2
    assert all("RAY_UP_enable_autoscaler_v2=0 ray" in line for line in commands)


def exported() -> dict[str, str]:
    """What the environment file sets, as a shell on a node sees it."""
    script = f'. {ENVIRONMENT}; {sys.executable} -c "import os, json; print(json.dumps(dict(os.environ)))"'
    shown = subprocess.run(["bash", "-c", script], env={"PATH": os.defpath}, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(shown.stdout)
    return {name: value for name, value in found.items() if name.startswith("RAY_")}


def test_nodes_of_a_cluster_have_what_a_local_run_sets() -> None:
    """The local run's token is its own; a cluster's comes from a file."""
    script = (
        "import os, json; from deployments.app import _prepare_environment; before = dict(os.environ);"
        "_prepare_environment(); print(json.dumps({k: v for k, v in os.environ.items() if k not in before}))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env={"PATH": os.defpath}, capture_output=True, text=True, check=True
    )
    local: dict[str, str] = json.loads(shown.stdout)
    assert local.pop("RAY_AUTH_TOKEN")
    assert local.pop("PYTHONPATH") == str(ROOT)  # a cluster installs it
    assert len(local) > 3
    there = exported()
    assert {name: there.get(name) for name in local} == local
