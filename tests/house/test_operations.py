from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from turnout.config import TurnoutConfig, load_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cluster() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    return values


def test_ray_accepts_the_cluster_file(cluster: dict[str, Any]) -> None:
    prepared = prepare_config(copy.deepcopy(cluster))
    validate_config(prepared)
    assert prepared["head_node_type"] in prepared["available_node_types"]


def test_ray_refuses_a_misspelt_cluster_file(cluster: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError, match="max_worker"):
        validate_config(prepare_config(cluster | {"max_worker": 1}))


def test_the_cluster_has_a_head_without_and_workers_with_gpus(cluster: dict[str, Any]) -> None:
    types = cluster["available_node_types"]
    assert "GPU" not in types["head"]["resources"]
    assert types["gpu_worker"]["resources"]["GPU"] >= 1
    assert types["gpu_worker"]["max_workers"] <= cluster["max_workers"]


@pytest.mark.parametrize("role", ["head", "worker"])
def test_every_node_starts_ray_with_authentication_from_our_environment(cluster: dict[str, Any], role: str) -> None:
    (start,) = [line for line in cluster[f"{role}_start_ray_commands"] if "ray start" in line]
    assert "RAY_AUTH_MODE=token" in start
    assert "~/turnout/.venv/bin/ray start" in start
    assert ("--temp-dir=" in start) == (role == "head")


@pytest.mark.parametrize("path", sorted((ROOT / "ops").glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_configuration_is_accepted(path: Path) -> None:
    assert load_config(path).pools


def test_the_demo_file_is_the_demo_configuration() -> None:
    assert load_config(ROOT / "ops" / "demo.yaml") == TurnoutConfig.demo()
