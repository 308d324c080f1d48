"""The compose file and the image: what can be known of them without a container engine."""

from __future__ import annotations

import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from turnout.config import TurnoutConfig, parse_config
from turnout.kvstore_config import OFF

ROOT = Path(__file__).parents[2]
OPS = ROOT / "ops"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DOCKERFILE = (OPS / "docker" / "Dockerfile").read_text(encoding="utf-8")
# Of the image, without comments, and with continued lines joined.
STEPS = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE)).splitlines()


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = read(OPS / "compose" / "compose.yaml")["services"]
    return found


@pytest.fixture(scope="module")
def config() -> TurnoutConfig:
    return parse_config(read(OPS / "compose" / "turnout.yaml"))


def published(service: dict[str, Any]) -> dict[int, int]:
    """Port of the container by port of the machine; only this machine may reach them."""
    found = {}
    for port in service.get("ports", ()):
        address, outer, inner = port.split(":")
        assert address == "127.0.0.1"
        found[int(outer)] = int(inner)
    return found


def mounted(service: dict[str, Any]) -> dict[str, Path]:
    """What of this checkout a service sees, by its path there."""
    parts = [each.split(":") for each in service["volumes"] if each.startswith(".")]
    assert all(mode == "ro" for _, _, mode in parts)
    return {place: (OPS / "compose" / source).resolve() for source, place, _ in parts}


def test_what_is_mounted_exists_and_lies_where_it_is_looked_for(services: dict[str, Any]) -> None:
    found = {name: mounted(each) for name, each in services.items() if "volumes" in each}
    assert [path for places in found.values() for path in places.values() if not path.exists()] == []
    assert services["turnout"]["command"][-1].split()[-1] in found["turnout"]
    assert (found["prometheus"]["/etc/prometheus"] / "prometheus.yml").is_file(), "the image's default"
    provisioning = found["grafana"]["/etc/grafana/provisioning"]
    (provider,) = read(provisioning / "dashboards" / "turnout.yaml")["providers"]
    dashboards = found["grafana"][provider["options"]["path"]]
    assert {json.loads(path.read_text())["uid"] for path in dashboards.glob("*.json")} >= {"turnout-service"}


def test_services_are_asked_where_they_listen(services: dict[str, Any], config: TurnoutConfig) -> None:
    server = config.server
    assert published(services["turnout"]) == {server.http_port: server.http_port, server.grpc_port: server.grpc_port}
    assert server.http_host == "0.0.0.0"
    assert f"http://localhost:{server.http_port}/healthz" in services["turnout"]["healthcheck"]["test"]
    jobs = {job["job_name"]: job for job in read(OPS / "prometheus" / "prometheus.yml")["scrape_configs"]}
    assert jobs["turnout"]["static_configs"] == [{"targets": [f"turnout:{server.http_port}"]}]
    (source,) = read(OPS / "grafana" / "provisioning" / "datasources" / "turnout.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert published(services["prometheus"]) == {9090: 9090}
    assert published(services["grafana"]) == {3000: 3000}
    assert services.keys() == {"turnout", "store", "prometheus", "grafana"}


def test_the_store_is_what_the_configuration_asks_for(services: dict[str, Any], config: TurnoutConfig) -> None:
    assert config.kvstore.url == "redis://store:6379" != OFF
    words = services["store"]["command"]
    settings = dict(zip(words[1::2], words[2::2], strict=True))
    assert settings["--maxmemory-policy"] == "volatile-ttl"
    assert (settings["--save"], settings["--appendonly"]) == ("", "no")
    assert "ports" not in services["store"]
    assert f"> {config.kvstore.root_key_file}" in services["turnout"]["command"][-1]
    state = Path(str(config.kvstore.root_key_file)).parent
    assert f"state:{state}" in services["turnout"]["volumes"]
    assert f"install -d -o 1000 -g 100 {state}" in DOCKERFILE, "a new volume is its user's"


def test_a_server_has_the_time_to_end(services: dict[str, Any], config: TurnoutConfig) -> None:
    assert float(services["turnout"]["stop_grace_period"].removesuffix("s")) > config.server.shutdown_grace_s


def test_every_image_is_of_one_version(services: dict[str, Any]) -> None:
    images = [each["image"] for each in services.values()]
    assert services["turnout"]["image"] == f"turnout:{PROJECT['version']}"
    assert [image for image in images if not re.search(r":v?\d+\.\d+\.\d+[\w-]*$", image)] == []
    assert services["turnout"]["build"]["dockerfile"] == "ops/docker/Dockerfile"
    (python,) = re.findall(r"^FROM python:(\d+\.\d+\.\d+)-slim-\w+$", DOCKERFILE, re.MULTILINE)
    assert Version(python) in SpecifierSet(PROJECT["requires-python"])


def test_the_image_takes_nothing_but_packages_of_fixed_versions() -> None:
    installs = [part for step in STEPS for part in step.split("&&") if "pip install" in part]
    assert len(installs) == 4
    assert [part for part in installs if "-c constraints.txt" not in part and "--no-deps" not in part] == []
    assert [step for step in STEPS if re.search(r"\b(curl|git clone|ADD|https?:)|\|\s*(ba)?sh\b", step)] == []


def test_the_image_is_made_of_files_that_exist_and_of_no_secret() -> None:
    sources = [name for step in STEPS if step.startswith("COPY ") for name in step.split()[1:-1]]
    assert sources == ["pyproject.toml", "constraints.txt", "README.md", "."]
    assert [name for name in sources if not (ROOT / name).exists()] == []
    ignored = (OPS / "docker" / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    for name in (".git", ".venv", ".runs", "root.key", "tests", "dist", ".mypy_cache"):
        assert any(fnmatch(name, each.removeprefix("**/")) for each in ignored), name
