"""Two ingress processes that listen themselves, on the session's cluster."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
from ray import serve

from deployments.app import QUIET, build_app
from kvstore.keys import write_root_key
from kvstore.redis.embedded import EmbeddedServer
from tests.deployments.access.kit import write_house
from tests.deployments.conftest import poll
from tests.deployments.fake_pool import load_pool
from tests.deployments.served_pool import kill
from turnout.config import TurnoutConfig, parse_config
from turnout.free_ports import free_port
from turnout.proto import generation_pb2 as pb
from turnout.proto.generation_pb2_grpc import GenerationStub

APP, LIMIT = "direct", 5
TASKS = re.compile(r'^turnout_ingress_tasks\{process="(\d+)"\}', re.MULTILINE)
ANSWERED = re.compile(
    r'^turnout_tenant_requests_total\{.*outcome="OK",process="(\d+)",tenant="open"\} (\S+)', re.MULTILINE
)


@dataclass
class Site:
    config: TurnoutConfig
    keys: dict[str, str]

    def ask(self, tenant: str = "open") -> int:
        """Status of a request over a connection of its own; 0: it was cut off."""
        url = f"http://127.0.0.1:{self.config.server.http_port}/v1/completions"
        body = {"model": "demo", "prompt": "hi", "max_tokens": 2}
        headers = {"Authorization": f"Bearer {self.keys[tenant]}"}
        try:
            return httpx.post(url, json=body, headers=headers, timeout=60).status_code
        except httpx.TransportError:
            return 0

    def metrics(self) -> str:
        return httpx.get(f"http://127.0.0.1:{self.config.server.http_port}/metrics", timeout=60).text

    def processes(self) -> set[int]:
        return set(map(int, TASKS.findall(self.metrics())))

    def answered(self) -> dict[int, float]:
        return {int(pid): float(count) for pid, count in ANSWERED.findall(self.metrics())}


def has_let_go(pid: int) -> bool:
    """Whether a process that was killed has closed its files."""
    try:
        return not list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it is gone
        return True


@pytest.fixture(scope="module")
def site(cluster: tuple[TurnoutConfig, Path | None], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("house")
    keys = write_house(folder, {"open": {}, "limited": {"requests_per_minute": LIMIT}})
    write_root_key(folder / "root.key")
    with EmbeddedServer(tmp_path_factory.mktemp("redis"), 32 << 20) as store:
        values = cluster[0].model_dump(mode="json") | {
            "pools": {"demo": {"small": "small", "large": "large"}},
            "server": {"grpc_port": free_port(), "http_port": free_port(), "ingress_processes": 2},
            "batches": None,
            "access": {"tenants_file": str(folder / "tenants.yaml")},
            "kvstore": {"url": store.url, "root_key_file": str(folder / "root.key")},
        }
        config = parse_config(values)
        serve.run(build_app(config, load_pool), name=APP, route_prefix=None, logging_config=QUIET)
        yield Site(config, keys)
        serve.delete(APP, _blocking=False)
        poll(lambda: APP not in serve.status().applications, "the application is gone", 60)


def test_both_processes_answer_and_metrics_are_those_of_both(site: Site) -> None:
    asked = 0

    def both() -> bool:
        nonlocal asked
        asked += 1
        assert site.ask() == 200
        return len(site.answered()) == 2

    poll(both, "both processes have answered", 60)
    assert set(site.answered()) == site.processes()
    assert sum(site.answered().values()) == asked


def test_limits_hold_over_both(site: Site) -> None:
    began = time.monotonic()
    found = [site.ask("limited") for _ in range(4 * LIMIT)]
    freed = int((time.monotonic() - began) * LIMIT / 60) + 1
    assert LIMIT <= found.count(200) <= min(LIMIT + freed, 2 * LIMIT - 1)
    assert set(found) == {200, 429}


def test_grpc_answers_without_a_proxy(site: Site) -> None:
    metadata = [("authorization", f"Bearer {site.keys['open']}")]
    with grpc.insecure_channel(f"127.0.0.1:{site.config.server.grpc_port}") as channel:
        stub = GenerationStub(channel)
        request = pb.GenerateRequest(model="demo", prompt="hi", sampling=pb.Sampling(max_tokens=3))
        chunks = list(stub.StreamGenerate(request, metadata=metadata))
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "abc"
        with pytest.raises(grpc.RpcError) as refusal:
            list(stub.StreamGenerate(request))
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_one_that_is_killed_is_replaced_while_the_other_answers(site: Site) -> None:
    before = site.processes()
    killed = min(before)
    kill(killed)
    # Connections that the kernel gave to it, while it was dying too, are cut off; new ones go to the other.
    poll(lambda: has_let_go(killed), "its sockets are closed", 30)
    assert [site.ask() for _ in range(4)] == [200] * 4
    poll(lambda: len(site.processes() - {killed}) == 2, "there are two again", 60)
    assert before - {killed} < site.processes()
