"""Tenants through Serve: keys, limits, records over lost replicas, and a flood from one of them."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import httpx
import pytest
from ray import serve

from benchmarks.noisy_neighbour import Flood, Flooded, flooding
from deployments.access.keys import make_key
from deployments.access.tenants_file import read_tenants, write_tenants
from deployments.access.usage_record import UsageRecord
from deployments.access.usage_totals import RecordFiles
from deployments.app import QUIET, build_app
from tests.deployments.access.kit import write_house
from tests.deployments.access.test_callers import RSA, public_pem, token
from tests.deployments.access.test_front_ends import call_once
from tests.deployments.conftest import poll
from tests.deployments.fake_pool import load_pool
from tests.telling import tell
from turnout.client_messages import error
from turnout.config import TurnoutConfig, parse_config
from turnout.proto import generation_pb2 as pb
from turnout.proto.generation_pb2_grpc import GenerationStub

APP = "tenants"
LOUD, QUIET_ONES, ROUNDS = 16, 40, 5
# The goal is 2 for the 95th percentile, which `make bench-flood` judges: it takes more requests than a test has. Where
# clients, proxy and engine share two hardware threads, rounds lie between 1.7 and 3.6 (docs/results/README.md), as
# quick as the machine is that day; medians lie between 1.3 and 1.75.
MOST = 2.5


@dataclass
class Home:
    config: TurnoutConfig
    folder: Path
    keys: dict[str, str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.config.server.http_port}/{APP}"

    def headers(self, tenant: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[tenant]}"}

    def records(self, tenant: str) -> list[UsageRecord]:
        return [each for each in RecordFiles(self.folder / "usage").between() if each.tenant == tenant]


@pytest.fixture(scope="module")
def home(cluster: tuple[TurnoutConfig, Path | None], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    folder, base = tmp_path_factory.mktemp("home"), cluster[0]
    names = ("acme", "quiet", "lost", "old", "crawler", "sleeper", "crowd", "again-stream", "again-whole")
    tenants: dict[str, dict[str, Any]] = {
        **{name: {} for name in names},
        "one": {"requests_per_minute": 1},
        "loud": {"concurrency": 2},
    }
    keys = write_house(folder, tenants)
    (folder / "key.pem").write_bytes(public_pem(RSA))
    pair = {"small": "small", "large": "large"}
    values = base.model_dump(mode="json") | {
        "pools": {"demo": pair, "frail": pair, "real": {"small": "real-small", "large": "real-large"}},
        "access": {
            "tenants_file": str(folder / "tenants.yaml"),
            "usage": {"folder": str(folder / "usage")},
            "jwt": {"issuer": "https://id", "audience": "turnout", "key_file": str(folder / "key.pem")},
        },
    }
    config = parse_config(values)
    serve.run(build_app(config, load_pool), name=APP, route_prefix=f"/{APP}", logging_config=QUIET)
    yield Home(config, folder, keys)
    serve.delete(APP, _blocking=False)
    poll(lambda: APP not in serve.status().applications, "the application is gone", 60)


def ask(home: Home, tenant: str, **changes: Any) -> httpx.Response:
    body = {"model": "demo", "prompt": "hello", "max_tokens": 3, **changes}
    return httpx.post(f"{home.url}/v1/completions", json=body, headers=home.headers(tenant), timeout=120)


def test_keys_are_asked_for_and_end_without_a_restart(home: Home) -> None:
    assert httpx.get(f"{home.url}/v1/models", timeout=30).status_code == 401
    assert ask(home, "old").status_code == 200
    path = home.folder / "tenants.yaml"
    tenants = read_tenants(path)
    key, record = make_key()
    write_tenants(path, tenants.holding("old", tenants.tenant("old").model_copy(update={"keys": (record,)})))
    poll(lambda: ask(home, "old").status_code == 401, "the old key has ended", 20)
    home.keys["old"] = key
    assert ask(home, "old").status_code == 200


def twice(channel: grpc.Channel, streamed: bool, metadata: Any) -> None:
    """Two generations, of which the second one is too many, if the first one is not."""
    for _ in range(2):
        call_once(channel, streamed, metadata)


@pytest.mark.parametrize("streamed", [False, True])
def test_grpc_is_told_when_to_try_again(home: Home, streamed: bool) -> None:
    metadata = (("authorization", f"Bearer {home.keys['one']}"), ("application", APP))
    with (
        grpc.insecure_channel(f"127.0.0.1:{home.config.server.grpc_port}") as channel,
        pytest.raises(grpc.RpcError) as refused,
    ):
        twice(channel, streamed, metadata)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused.value.details().startswith("tenant.requests_per_minute: 1 allowed, 0 left")
    assert 0 < (error(refused.value.code(), refused.value.details()).retry_after_s or 0) <= 60
    if not streamed:  # of a stream that is refused, Serve passes on code and message only
        trailing = dict(refused.value.trailing_metadata())
        assert 0 < float(trailing["retry-after-s"]) <= 60
        assert trailing["grpc-status-details-bin"]


def test_what_is_sent_is_what_is_recorded_when_clients_leave_and_replicas_are_lost(home: Home) -> None:
    body = {"model": "demo", "prompt": "slow", "max_tokens": 500, "stream": True}
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", f"{home.url}/v1/completions", json=body, headers=home.headers("acme")) as answer,
    ):
        read = 0
        for line in answer.iter_lines():
            read += line.startswith("data: ")
            if read == 3:
                break
    poll(lambda: len(home.records("acme")) == 1, "the record is written", 30)
    [cut] = home.records("acme")
    assert (cut.prompt_tokens, cut.outcome) == (4, "CANCELLED")
    assert read <= cut.completion_tokens < 20
    # Its replica ends at the fourth token, twice: the client has what left before, and is told.
    lines = httpx.post(
        f"{home.url}/v1/completions",
        json={**body, "model": "frail", "prompt": "die", "max_tokens": 9},
        headers=home.headers("lost"),
        timeout=120,
    ).text.splitlines()
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines if '"choices": [{' in line]
    poll(lambda: len(home.records("lost")) == 1, "the record is written", 30)
    [lost] = home.records("lost")
    assert (lost.outcome, lost.completion_tokens) == ("INTERNAL", len("".join(texts)))
    assert 1 <= lost.completion_tokens <= 3


@pytest.mark.parametrize("stream", [True, False])
def test_what_another_replica_goes_on_with_is_recorded_as_it_was_read(home: Home, tmp_path: Path, stream: bool) -> None:
    tenant = "again-stream" if stream else "again-whole"
    mark = tmp_path / "lost"
    prompt = f"die_once={mark}"
    answer = ask(home, tenant, model="frail", prompt=prompt, max_tokens=9, stream=stream)
    assert mark.exists()
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        text = "".join(each["choices"][0]["text"] for each in events)
    else:
        text = answer.json()["choices"][0]["text"]
    assert text == "abcdefghi"
    poll(lambda: len(home.records(tenant)) == 1, "the record is written", 30)
    [record] = home.records(tenant)
    assert (record.outcome, record.prompt_tokens, record.completion_tokens) == ("OK", len(prompt), 9)


def test_a_stream_read_at_a_crawl_holds_up_nobody(home: Home) -> None:
    # Far more than sockets on the way would take: what is not read is kept by the server.
    asked = {"model": "demo", "prompt": "fast", "max_tokens": 4000, "n": 4, "logprobs": 5, "stream": True}
    text = json.dumps(asked)
    head = f"POST /{APP}/v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {home.keys['crawler']}\r\n"
    with socket.create_connection(("127.0.0.1", home.config.server.http_port)) as crawler:
        crawler.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        crawler.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode())
        for _ in range(3):
            assert crawler.recv(1)
            began = time.monotonic()
            assert ask(home, "old").json()["choices"][0]["text"] == "abc"
            assert time.monotonic() - began < 10
        # The pool has written all of it: the request is over, whoever still reads.
        poll(lambda: len(home.records("crawler")) == 1, "the record is written", 60)
        assert crawler.recv(1)
    [record] = home.records("crawler")
    assert (record.outcome, record.completion_tokens) == ("OK", 4 * 4000)


def test_a_grpc_stream_that_nobody_reads_is_recorded_when_the_pool_has_written_it(home: Home) -> None:
    sampling = pb.Sampling(max_tokens=4000, n=4, logprobs=5)
    request = pb.GenerateRequest(model="demo", prompt="fast", sampling=sampling)
    metadata = (("authorization", f"Bearer {home.keys['sleeper']}"), ("application", APP))
    with grpc.insecure_channel(f"127.0.0.1:{home.config.server.grpc_port}") as channel:
        stream = GenerationStub(channel).StreamGenerate(request, metadata=metadata)
        next(stream)
        for _ in range(3):
            began = time.monotonic()
            assert ask(home, "old").json()["choices"][0]["text"] == "abc"
            assert time.monotonic() - began < 10
        poll(lambda: len(home.records("sleeper")) == 1, "the record is written", 60)
        stream.cancel()
    [record] = home.records("sleeper")
    assert (record.outcome, record.completion_tokens) == ("OK", 4 * 4000)


def test_no_key_and_no_token_is_in_what_ray_and_its_processes_log(
    home: Home, cluster: tuple[TurnoutConfig, Path | None]
) -> None:
    """Head, raylet, controller, proxies and replicas: all files of the session, after good, bad, failing requests."""
    unknown = "tk_123456789abc_" + "s" * 43
    signed = [token(kid=""), token(kid="", aud="elsewhere")]
    given = [home.keys["acme"], unknown, "not-a-key-of-ours", *signed]
    for key, status in zip(given, (500, 401, 401, 500, 401), strict=True):
        headers = {"Authorization": f"Bearer {key}"}
        body = {"model": "demo", "prompt": "crash", "max_tokens": 9}
        assert httpx.post(f"{home.url}/v1/completions", json=body, headers=headers, timeout=60).status_code == status
        httpx.post(f"{home.url}/v1/completions", content=b"{" + key.encode(), headers=headers, timeout=60)
        httpx.get(f"{home.url}/v1/nothing", params={"key": "x"}, headers=headers, timeout=60)
        with grpc.insecure_channel(f"127.0.0.1:{home.config.server.grpc_port}") as channel:
            metadata = (("authorization", f"Bearer {key}"), ("application", APP))
            if status == 401:
                with pytest.raises(grpc.RpcError) as refused:
                    call_once(channel, False, metadata)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            else:
                call_once(channel, False, metadata)
    folder = cluster[1]
    assert folder is not None
    logs = {path: path.read_bytes() for path in folder.rglob("logs/**/*") if path.is_file() and not path.is_symlink()}
    written = b"\n".join(logs.values())
    assert {"raylet.out", "gcs_server.out"} <= {path.name for path in logs}
    assert APP.encode() in written  # it did look at what Serve logged of this application
    records = [
        record for tenant in read_tenants(home.folder / "tenants.yaml").tenants.values() for record in tenant.keys
    ]
    secrets = [key.split("_", 2)[-1] for key in (*home.keys.values(), *given[:3])] + [record.hash for record in records]
    secrets += [each.rpartition(".")[2] for each in signed]  # a signature, which makes a token of what else it says
    assert [path.name for path, text in logs.items() if any(each.encode() in text for each in secrets)] == []


def first_token_s(home: Home, client: httpx.Client, tenant: str, max_tokens: int = 6) -> float:
    """Seconds to the first token; the rest is read too."""
    body = {"model": "real", "prompt": "12 + 7 =", "max_tokens": max_tokens, "stream": True, "temperature": 0}
    began = time.monotonic()
    with client.stream("POST", f"{home.url}/v1/completions", json=body, headers=home.headers(tenant)) as answer:
        assert answer.status_code == 200, answer.read()
        lines = answer.iter_lines()
        next(line for line in lines if line)
        first = time.monotonic() - began
        for _ in lines:
            pass
    return first


def p95(times: list[float]) -> float:
    return sorted(times)[int(0.95 * (len(times) - 1))]


def flood_of(home: Home, tenant: str) -> Flood:
    body = {"model": "real", "prompt": "def f(x):", "max_tokens": 100, "ignore_eos": True}
    return Flood(f"{home.url}/v1/completions", home.keys[tenant], LOUD, body)


@pytest.mark.parametrize("tenant", ["loud", "crowd"])
def test_a_flood_from_one_tenant_does_not_make_others_queue(home: Home, tenant: str) -> None:
    """One tenant has a limit and takes no notice of being refused; the other one may do whatever it likes."""
    floods, ratios, longest = list[Flooded](), list[float](), list[float]()
    with httpx.Client(timeout=120) as client:
        for _ in range(4):
            first_token_s(home, client, "quiet")
        for _ in range(ROUNDS):
            alone = [first_token_s(home, client, "quiet") for _ in range(QUIET_ONES)]
            with flooding(flood_of(home, tenant)) as flooded:
                beside = [first_token_s(home, client, "quiet") for _ in range(QUIET_ONES)]
            floods.append(flooded)
            # Once more: the machine may have become faster or slower meanwhile.
            alone += [first_token_s(home, client, "quiet") for _ in range(QUIET_ONES)]
            ratios.append(median(beside) / median(alone))
            longest.append(p95(beside))
            tell(f"{tenant}: 95th percentile {p95(beside) / p95(alone):.2f} times, median {ratios[-1]:.2f} times")
    # A round in which the machine did something else as well says nothing.
    assert median(ratios) <= MOST, ratios
    # Whoever has to wait for a place of the flood's waits for an answer of the flood.
    assert median(longest) <= median(took for each in floods for took in each.answered_s) / 2, longest
    # Whoever is refused is told when to come, and asks again at once; who has no limit is never refused.
    refused = sum(each.refused for each in floods)
    assert refused >= 4 * LOUD if tenant == "loud" else refused == 0
    assert not any(each.unnamed or each.failed for each in floods)
    answered = sum(each.used.requests for each in floods)
    poll(lambda: len(home.records(tenant)) == answered, "what the flood got is recorded", 30)
    records = home.records(tenant)
    assert sum(each.prompt_tokens for each in records) == sum(each.used.prompt_tokens for each in floods)
    assert sum(each.completion_tokens for each in records) == sum(each.used.completion_tokens for each in floods)
