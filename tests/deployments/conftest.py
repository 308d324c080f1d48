"""One Ray and one Serve for all end-to-end tests of this folder."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
import ray
from ray import serve

from deployments.app import RunningServer, deploy, end_app, start_local_ray, start_serve
from tests.deployments.fake_pool import load_pool
from turnout.batches_config import BatchesConfig
from turnout.calls import PoolStats
from turnout.config import TurnoutConfig, parse_config


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def served_config() -> TurnoutConfig:
    """`demo` is roomy; `narrow` takes one request and lets one wait; `frail` is there to be killed; `real` is real."""
    pair = {"small": "small", "large": "large"}
    return parse_config(
        {
            "models": {
                "small": {"path": "none"},
                "large": {"path": "none"},
                "real-small": {"path": "demo:small", "dtype": "float32", "kv_memory_bytes": 16 << 20},
                "real-large": {"path": "demo:large", "dtype": "float32", "kv_memory_bytes": 128 << 20},
            },
            "pools": {
                "demo": pair,
                "narrow": {**pair, "max_ongoing_requests": 1, "max_queued_requests": 1},
                "frail": pair,
                "real": {"small": "real-small", "large": "real-large"},
            },
            "server": {
                "grpc_port": free_port(),
                "http_port": free_port(),
                "request_timeout_s": 30,
                "shutdown_grace_s": 1,
            },
            "ray": {"num_cpus": 8},
        }
    )


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TurnoutConfig, Path | None]]:
    """Ray and Serve, and nothing served."""
    batches = BatchesConfig(folder=str(tmp_path_factory.mktemp("batches")))
    config = served_config().model_copy(update={"batches": batches})
    folder = start_local_ray(config)
    start_serve(config)
    yield config, folder
    serve.shutdown()
    ray.shutdown()
    shutil.rmtree(folder or "", ignore_errors=True)


@pytest.fixture(scope="session")
def server(cluster: tuple[TurnoutConfig, Path | None]) -> Iterator[RunningServer]:
    config, _ = cluster
    deploy(config, load_pool)
    at = config.server
    yield RunningServer(f"127.0.0.1:{at.grpc_port}", f"http://{at.http_host}:{at.http_port}", tuple(config.pools))
    end_app(config.server.shutdown_grace_s)


def poll(condition: Callable[[], bool], what: str, timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not in {timeout_s} s: {what}"
        time.sleep(0.02)


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.http_url, timeout=60) as client:
        yield client


@pytest.fixture
def openai_client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.http_url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def stats(server: RunningServer, pool: str = "demo") -> PoolStats:
    return server.stats()[pool][0]


def assert_freed(server: RunningServer, pool: str = "demo") -> None:
    poll(lambda: stats(server, pool).requests == 0 and stats(server, pool).used_blocks == 0, "the pool is idle")
