"""One Ray and one Serve for all end-to-end tests of this folder."""

from __future__ import annotations

import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import httpx
import openai
import pytest
import ray
from ray import serve

from deployments.app import APP_NAME, RunningServer, deploy, start_local_ray, start_serve
from deployments.ending import end_app
from deployments.http import build_http
from deployments.service import GenerationService
from tests.deployments.fake_pool import load_pool
from tests.deployments.in_process import make_service
from turnout.batches_config import BatchesConfig
from turnout.calls import PoolStats
from turnout.config import TurnoutConfig, parse_config
from turnout.free_ports import free_port


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
                "request_timeout_s": 90,
                "shutdown_grace_s": 1,
            },
            "engine": {"threads": 1},
            "ray": {"num_cpus": 8},
        }
    )


class Site:
    """Ray, Serve and the application, each started when it is first asked for."""

    def __init__(self) -> None:
        self._at: tuple[TurnoutConfig, Path | None] | None = None
        self._served = False

    def open(self, batches: Path) -> tuple[TurnoutConfig, Path | None]:
        if self._at is None:
            config = served_config().model_copy(update={"batches": BatchesConfig(folder=str(batches))})
            self._at = config, start_local_ray(config)
            start_serve(config)
        return self._at

    def serve(self, config: TurnoutConfig) -> RunningServer:
        if not self._served:
            deploy(config, load_pool)
            self._served = True
        at = config.server
        return RunningServer(f"127.0.0.1:{at.grpc_port}", f"http://{at.http_host}:{at.http_port}", tuple(config.pools))

    def close(self) -> None:
        if self._at is None:
            return
        config, folder = self._at
        if self._served:
            end_app(APP_NAME, config.server.shutdown_grace_s)
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder or "", ignore_errors=True)
        self._at, self._served = None, False


SITE = Site()
HERE = Path(__file__).parent


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Even when nobody asks anything, a cluster takes a seventh of a core from the tests of other folders."""
    if nextitem is None or HERE not in nextitem.path.parents:
        SITE.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> tuple[TurnoutConfig, Path | None]:
    """Ray and Serve, and nothing served."""
    return SITE.open(tmp_path_factory.mktemp("batches"))


@pytest.fixture(scope="module")
def server(cluster: tuple[TurnoutConfig, Path | None]) -> RunningServer:
    return SITE.serve(cluster[0])


def poll(condition: Callable[[], bool], what: str, timeout_s: float = 60.0, seen: Sequence[object] = ()) -> None:
    """Wait for a condition; where it does not come, say the last of what was seen."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not in {timeout_s} s: {what}; {len(seen)} looks, the last: {seen[-1:]}"
        time.sleep(0.02)


@pytest.fixture
def service() -> GenerationService:
    return make_service()


@pytest.fixture
async def http(service: GenerationService) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application over a scripted pool, in this process."""
    transport = httpx.ASGITransport(app=build_http(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.fixture
def served_http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.http_url, timeout=60) as client:
        yield client


@pytest.fixture
def openai_client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.http_url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def stats(server: RunningServer, pool: str = "demo") -> PoolStats:
    return server.stats()[pool][0]


def assert_freed(server: RunningServer, pool: str = "demo") -> None:
    def idle() -> bool:
        held.append(stats(server, pool))
        return held[-1].requests == 0 and held[-1].used_blocks == 0

    held: list[PoolStats] = []
    poll(idle, "the pool is idle", seen=held)
