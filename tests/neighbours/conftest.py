"""A served router over two endpoints that are servers of others."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peer_servers import DIALECTS, LLAMA, MODEL, VLLM, Neighbour
from benchmarks.served import running_server
from experiments import real_model
from turnout.config import TurnoutConfig, parse_config
from turnout.errors import TurnoutError
from turnout.free_ports import on_free_ports

OPTIONS = {LLAMA: "--llama-cpp-python", VLLM: "--vllm-python"}
PYTHONS = {LLAMA: ".venv-peers/bin/python", VLLM: ".venv-vllm/bin/python"}
MODULES = {LLAMA: "xllamacpp", VLLM: "vllm"}
TARGETS = {LLAMA: "make venv-peers", VLLM: "make venv-vllm"}
PRICES = {
    LLAMA: {"input_usd_per_mtok": 1.0, "output_usd_per_mtok": 2.0, "cached_input_usd_per_mtok": 0.5},
    VLLM: {"input_usd_per_mtok": 3.0, "output_usd_per_mtok": 5.0, "cached_input_usd_per_mtok": 1.5},
}
PATIENCE_S = 600  # several servers share few cores


def pytest_addoption(parser: pytest.Parser) -> None:
    for name, option in OPTIONS.items():
        parser.addoption(option, default=PYTHONS[name], metavar="FILE", help=f"interpreter that has {MODULES[name]}")


@dataclass(frozen=True)
class Street:
    """The router and the servers behind it."""

    url: str
    neighbours: dict[str, Neighbour]


def interpreter(name: str, config: pytest.Config) -> Path:
    """The interpreter that runs a server; without it the test is skipped, with the command that installs it."""
    path = Path(config.getoption(OPTIONS[name]))
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({MODULES[name]!r}) is None)"
    if not path.is_file() or subprocess.run([str(path), "-c", look], check=False).returncode:
        pytest.skip(f"{path} has no {MODULES[name]}; {TARGETS[name]} installs it where there is a build of it")
    return path


def router(neighbours: dict[str, Neighbour]) -> TurnoutConfig:
    """Two pools for each server as the large model: an answer that breaks off ends there, or continues elsewhere."""
    models = {
        name: {
            "endpoint": {
                "url": f"{each.address}/v1",
                "model": MODEL,
                "dialect": DIALECTS[name],
                "timeout_s": PATIENCE_S,
                "breaker_failures": 3,
                "breaker_open_s": 5,
            },
            "price": PRICES[name],
        }
        for name, each in neighbours.items()
    }
    pools: dict[str, Any] = {}
    for first, second in ((LLAMA, VLLM), (VLLM, LLAMA)):
        roles = {"large": first, "small": second}
        pools[f"{first}-ends"] = {**roles, "failover": {}}
        pools[f"{first}-goes-on"] = {**roles, "failover": {"continue_elsewhere": True}}
    server = {"request_timeout_s": PATIENCE_S}
    return on_free_ports(parse_config({"models": models, "pools": pools, "server": server}))


@pytest.fixture(scope="session")
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Street]:
    pythons = {name: interpreter(name, request.config) for name in OPTIONS}
    try:
        files = {LLAMA: real_model.gguf_file(), VLLM: real_model.model_folder()}
    except TurnoutError as error:
        pytest.skip(error.message)
    folder = tmp_path_factory.mktemp("neighbours")
    neighbours = {name: Neighbour(name, pythons[name], files[name], folder / f"{name}.log") for name in OPTIONS}
    config = router(neighbours)
    try:
        for each in neighbours.values():
            each.start()
        for each in neighbours.values():
            each.wait()
        with running_server(config):
            yield Street(f"http://127.0.0.1:{config.server.http_port}", neighbours)
    finally:
        for each in neighbours.values():
            each.kill()


@pytest.fixture
def street(started: Street) -> Street:
    """Both servers up."""
    for each in started.neighbours.values():
        each.start()
        each.wait()
    return started
