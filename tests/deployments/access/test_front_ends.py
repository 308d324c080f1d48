"""Credentials, limits and sizes as clients meet them: real gRPC and HTTP clients, a real server in a thread."""

from __future__ import annotations

import asyncio
import http.client
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from tests.deployments.access.kit import House, Served, house, served
from tests.deployments.access.test_callers import RSA, public_pem, token
from tests.deployments.access.test_tenants_file import until
from turnout import message_size
from turnout.client import AsyncClient, Client
from turnout.errors import Code, TurnoutError
from turnout.proto import generation_pb2 as pb
from turnout.proto.generation_pb2_grpc import GenerationStub

TENANTS: dict[str, dict[str, Any]] = {
    "acme": {},
    "one": {"requests_per_minute": 1},
    "narrow": {"pools": ["demo"], "methods": ["plain"]},
    "boss": {"operator": True},
    "two": {"concurrency": 2},
    "poor": {"budget": {"amount": 1}},
}


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[House, Served]]:
    folder = tmp_path_factory.mktemp("house")
    (folder / "key.pem").write_bytes(public_pem(RSA))
    signed = {"issuer": "https://id", "audience": "turnout", "key_file": str(folder / "key.pem")}
    with house(folder, TENANTS, {"jwt": signed}, max_body_bytes=100_000) as made, served(made.service) as server:
        yield made, server


@pytest.fixture
def web(at: tuple[House, Served]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=at[1].url, timeout=30) as client:
        yield client


@pytest.fixture
def shared() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=30) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": "hello", "max_tokens": 2, **changes}


def test_openais_client_meets_its_typed_errors(at: tuple[House, Served], shared: httpx.Client) -> None:
    tenants, server = at

    def client(key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, http_client=shared)

    good = client(tenants.keys["acme"])
    assert good.completions.create(model="demo", prompt="x", max_tokens=2).choices[0].text == "ab"
    with pytest.raises(openai.AuthenticationError) as unknown:
        client("tk_000000000000_nobody").models.list()
    assert unknown.value.code == "invalid_api_key"
    with pytest.raises(openai.PermissionDeniedError) as forbidden:
        client(tenants.keys["narrow"]).completions.create(model="other", prompt="x")
    assert forbidden.value.param == "model"
    limited = client(tenants.keys["one"])
    limited.completions.create(model="demo", prompt="x", max_tokens=1)
    with pytest.raises(openai.RateLimitError) as exceeded:
        limited.completions.create(model="demo", prompt="x", max_tokens=1)
    assert exceeded.value.code == "rate_limit_exceeded"
    assert 45 <= int(exceeded.value.response.headers["retry-after"]) <= 60
    assert "1 allowed, 0 left" in exceeded.value.message


def test_an_answer_too_large_to_be_sent_at_once_is_refused_by_name(
    at: tuple[House, Served], web: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_size, "MOST_ANSWER_BYTES", 3000)
    key = at[0].keys["acme"]
    assert web.post("/v1/completions", json=body(), headers=bearer(key)).status_code == 200
    large = body(n=16, max_tokens=20, logprobs=5)
    answer = web.post("/v1/completions", json=large, headers=bearer(key))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    assert "stream it" in answer.json()["error"]["message"]
    with web.stream("POST", "/v1/completions", json={**large, "stream": True}, headers=bearer(key)) as got:
        assert got.read().endswith(b"data: [DONE]\n\n")
    with Client(at[1].address, api_key=key) as client:
        assert client.generate("hello", model="demo", max_tokens=2).choices[0].text == "ab"
        with pytest.raises(TurnoutError, match="stream it") as refused:
            client.generate("hello", model="demo", n=16, max_tokens=20, logprobs=5)
        assert (refused.value.code, refused.value.field) == (Code.OUT_OF_RANGE, "sampling.n")


def test_a_signed_token_is_as_good_as_a_key(web: httpx.Client) -> None:
    assert web.post("/v1/completions", json=body(), headers=bearer(token(kid=""))).status_code == 200
    assert web.post("/v1/completions", json=body(), headers=bearer(token(kid="", aud="x"))).status_code == 401


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/v1/models/demo"),
        ("GET", "/v1/methods"),
        ("GET", "/v1/tenant"),
        ("GET", "/v1/tenants"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
    ],
)
def test_nothing_is_told_without_a_key(web: httpx.Client, method: str, path: str) -> None:
    answer = web.request(method, path, content=b"{" if method == "POST" else None)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["param"] == "authorization"
    assert web.get("/healthz").status_code == 200


def test_models_are_those_a_tenant_may_ask(at: tuple[House, Served], web: httpx.Client) -> None:
    narrow = bearer(at[0].keys["narrow"])
    names = [each["id"] for each in web.get("/v1/models", headers=narrow).json()["data"]]
    assert names == ["demo", "small", "large"]
    assert web.get("/v1/models/other", headers=narrow).status_code == 404
    assert web.get("/v1/models/other", headers=bearer(at[0].keys["acme"])).status_code == 200


def test_a_name_that_is_not_known_tells_of_no_other_pool(at: tuple[House, Served], web: httpx.Client) -> None:
    head = bearer(at[0].keys["narrow"])
    for answer in (
        web.get("/v1/models/none", headers=head),
        web.post("/v1/completions", headers=head, json={"model": "none", "prompt": "x"}),
    ):
        assert answer.status_code == 404
        assert "demo" in answer.text
        assert "small-2" not in answer.text


def test_prompts_that_could_not_all_run_are_refused_before_one_does(
    at: tuple[House, Served], web: httpx.Client
) -> None:
    made, head = at[0], bearer(at[0].keys["two"])

    def ask(number: int, stream: bool) -> httpx.Response:
        body = {"model": "demo", "prompt": ["x"] * number, "max_tokens": 2, "stream": stream}
        return web.post("/v1/completions", headers=head, json=body)

    for stream in (False, True):
        refused = ask(3, stream)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
        assert ask(2, stream).status_code == 200
    outcomes = [record.outcome for record in made.records() if record.tenant == "two"]
    assert outcomes == ["OK"] * 4


def test_only_an_operator_sees_what_replicas_hold(at: tuple[House, Served], web: httpx.Client) -> None:
    assert web.get("/v1/status").status_code == 401
    assert web.get("/v1/status", headers=bearer(at[0].keys["acme"])).status_code == 403
    shown = web.get("/v1/status", headers=bearer(at[0].keys["boss"])).json()
    assert shown == web.get("/status").json()
    assert set(shown["pools"]) == {"demo", "other"}


def test_a_tenant_sees_itself_and_an_operator_all(at: tuple[House, Served], web: httpx.Client) -> None:
    mine = web.get("/v1/tenant", headers=bearer(at[0].keys["poor"])).json()
    assert (mine["tenant"], mine["limits"]["budget"]["amount"]) == ("poor", 1)
    assert mine["left"] == {"budget": 1}
    assert set(mine["usage"]) == {"tokens", "flops", "seconds"}
    assert web.get("/v1/tenants", headers=bearer(at[0].keys["acme"])).status_code == 403
    all_of_them = web.get("/v1/tenants", headers=bearer(at[0].keys["boss"])).json()
    assert [each["tenant"] for each in all_of_them["data"]] == sorted(TENANTS)
    assert all_of_them["faults"] == []


def test_a_budget_is_insufficient_quota(at: tuple[House, Served], web: httpx.Client) -> None:
    poor = bearer(at[0].keys["poor"])
    assert web.post("/v1/completions", json=body(), headers=poor).status_code == 200
    answer = web.post("/v1/completions", json=body(), headers=poor)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "insufficient_quota")
    assert int(answer.headers["retry-after"]) >= 1


def test_grpc_says_the_same_in_its_own_way(at: tuple[House, Served]) -> None:
    tenants, server = at
    with Client(server.address, api_key=tenants.keys["acme"]) as client:
        assert client.generate("x", model="demo", max_tokens=2).text == "ab"
        assert "".join(chunk.text for chunk in client.stream("x", model="demo", max_tokens=2)) == "ab"
        assert client.score("ab", ["c"], model="demo")
        assert len(client.models()) == 6
        assert client.methods()
    with Client(server.address) as nobody:
        assert nobody.healthy(10)  # what balancers ask
        for ask in (
            lambda: nobody.generate("x", model="demo"),
            lambda: list(nobody.stream("x", model="demo")),
            lambda: nobody.score("a", ["b"], model="demo"),
            nobody.models,
            nobody.methods,
        ):
            with pytest.raises(TurnoutError) as refused:
                ask()
            assert (refused.value.code, refused.value.field) == (Code.UNAUTHENTICATED, "authorization")
    with (
        Client(server.address, api_key=tenants.keys["narrow"]) as narrow,
        pytest.raises(TurnoutError) as forbidden,
    ):
        narrow.generate("x", model="demo", method="best_of")
    assert forbidden.value.code is Code.PERMISSION_DENIED


async def test_the_async_client_takes_a_key_too(at: tuple[House, Served]) -> None:
    async with AsyncClient(at[1].address, api_key=at[0].keys["acme"]) as client:
        assert (await client.generate("x", model="demo", max_tokens=2)).text == "ab"
        async with client.stream("x", model="demo", max_tokens=2) as stream:
            assert "".join([chunk.text async for chunk in stream]) == "ab"
        assert await client.models()
        assert await client.methods()
        assert await client.score("a", ["b"], model="demo")


def call_once(channel: grpc.Channel, streamed: bool, metadata: Any) -> None:
    """A generation, read to its end."""
    stub = GenerationStub(channel)
    request = pb.GenerateRequest(model="demo", prompt="x", sampling=pb.Sampling(max_tokens=1))
    if streamed:
        list(stub.StreamGenerate(request, metadata=metadata))
    else:
        stub.Generate(request, metadata=metadata)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_limit_tells_grpc_clients_when_to_try_again(tmp_path: Path, streamed: bool) -> None:
    with house(tmp_path, {"one": {"requests_per_minute": 1}}) as tenants, served(tenants.service) as server:
        with Client(server.address, api_key=tenants.keys["one"]) as client:
            client.generate("x", model="demo", max_tokens=1)
            with pytest.raises(TurnoutError) as refused:
                client.generate("x", model="demo", max_tokens=1)
            assert refused.value.code is Code.RESOURCE_EXHAUSTED
            assert refused.value.retry_after_s == pytest.approx(60, abs=15)
        with grpc.insecure_channel(server.address) as channel:
            metadata = (("authorization", f"Bearer {tenants.keys['one']}"),)
            with pytest.raises(grpc.RpcError) as raw:
                call_once(channel, streamed, metadata)
        trailing = dict(raw.value.trailing_metadata())
        assert 45 < float(trailing["retry-after-s"]) <= 60
        status, retry = Status.FromString(trailing["grpc-status-details-bin"]), RetryInfo()
        assert (status.code, status.message) == (raw.value.code().value[0], raw.value.details())
        assert status.details[0].Unpack(retry)
        assert 45 < retry.retry_delay.ToTimedelta().total_seconds() <= 60


def test_a_large_body_is_refused_by_its_length_before_it_is_sent(at: tuple[House, Served]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", at[1].http_port, timeout=10)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Authorization", f"Bearer {at[0].keys['acme']}")
    connection.putheader("Content-Length", str(50 << 20))
    connection.endheaders()  # and not one byte of it
    answer = connection.getresponse()
    assert answer.status == 413
    assert b"at most 100000 bytes" in answer.read()
    connection.close()


def test_a_large_body_of_unknown_length_is_refused_while_it_is_read(at: tuple[House, Served]) -> None:
    sent = 0

    def parts() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(800):
            sent += 1 << 16
            yield b" " * (1 << 16)

    with httpx.Client(base_url=at[1].url, timeout=30) as client:
        try:
            answer = client.post("/v1/completions", content=parts(), headers=bearer(at[0].keys["acme"]))
            assert answer.status_code == 413
        except httpx.TransportError:
            assert sent < 50 << 20  # the server has gone before all of it was sent
        assert client.get("/healthz").status_code == 200


def test_a_large_message_is_refused(at: tuple[House, Served]) -> None:
    with (
        Client(at[1].address, api_key=at[0].keys["acme"]) as client,
        pytest.raises(TurnoutError, match="at most 100000 bytes") as refused,
    ):
        client.generate("x" * 200_000, model="demo")
    assert refused.value.code is Code.RESOURCE_EXHAUSTED


def test_a_stream_read_at_a_crawl_holds_up_nobody(at: tuple[House, Served], web: httpx.Client) -> None:
    tenants, server = at
    key = tenants.keys["acme"]
    text = '{"model": "demo", "prompt": "fast", "max_tokens": 4000, "stream": true}'
    crawler = socket.create_connection(("127.0.0.1", server.http_port))
    crawler.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(text)}\r\n"
    crawler.sendall(f"{head}\r\n{text}".encode())
    try:
        assert crawler.recv(1) == b"H"
        limits = tenants.service.callers.limits("acme")
        for _ in range(3):
            began = time.monotonic()
            answer = web.post("/v1/completions", json=body(max_tokens=5), headers=bearer(key))
            assert answer.json()["choices"][0]["text"] == "abcde"
            assert time.monotonic() - began < 25
            assert crawler.recv(1)
        assert tenants.service.admission.left("acme", limits) == {}
    finally:
        crawler.close()
    # The server finds out when it writes: what the request held is given back.
    until(lambda: asyncio.run(_idle(tenants)), 20)


def test_a_grpc_stream_that_nobody_reads_holds_up_nobody_and_no_place_of_the_pool(at: tuple[House, Served]) -> None:
    """One message is read, and the rest once others were answered: it was kept meanwhile, and nothing of it is lost."""
    (tenants, server), key = at, at[0].keys["acme"]
    request = pb.GenerateRequest(model="demo", prompt="fast", sampling=pb.Sampling(max_tokens=4000, logprobs=20))
    # Flow control at its least, so that neither the channel nor the sockets take the whole answer.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    with grpc.insecure_channel(server.address, options) as channel, Client(server.address, api_key=key) as client:
        stream = GenerationStub(channel).StreamGenerate(request, metadata=(("authorization", f"Bearer {key}"),))
        messages = [next(stream)]
        for _ in range(3):
            began = time.monotonic()
            assert client.generate("x", model="demo", max_tokens=5).text == "abcde"
            assert time.monotonic() - began < 25
        # The pool has written all of it, and may answer others in its place.
        until(lambda: asyncio.run(_idle(tenants)), 20)
        assert tenants.service.held()["running"] == 1
        messages += stream
    assert sum(len(choice.tokens) for message in messages for choice in message.choices) == 4000
    tenants.assert_idle()


async def _idle(tenants: House) -> bool:
    stats = await tenants.service.stats()
    return all(each.requests == 0 for pool in stats.values() if isinstance(pool, list) for each in pool)


def test_no_secret_is_in_a_log_a_metric_an_error_or_a_repr(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Everything that is written or shown while good, bad, limited and failing requests come is searched."""
    caplog.set_level(logging.DEBUG)
    shown: list[str] = []
    tenants: dict[str, dict[str, Any]] = {"acme": {}, "one": {"requests_per_minute": 1}}
    (tmp_path / "key.pem").write_bytes(public_pem(RSA))
    signed = {"issuer": "https://id", "audience": "turnout", "key_file": str(tmp_path / "key.pem")}
    bad = "tk_123456789abc_" + "s" * 43
    forged, good = token(kid="", tenant="acme", iss="https://evil"), token(kid="", tenant="acme")
    with house(tmp_path, tenants, {"jwt": signed}) as made, served(made.service) as server:
        given = [*made.keys.values(), bad, forged, good]
        for key in given:
            with Client(server.address, api_key=key) as client:
                for ask in (client.models, lambda c=client: c.generate("crash", model="demo"), client.methods):
                    try:
                        ask()
                    except TurnoutError as error:
                        shown += [repr(error), str(error), repr(error.args)]
                shown.append(repr(client))
            with httpx.Client(base_url=server.url, headers=bearer(key), timeout=30) as web:
                for path in ("/v1/models", "/v1/tenant", "/v1/tenants", "/metrics", "/status", "/v1/nothing"):
                    shown.append(web.get(path).text)
                shown.append(web.post("/v1/completions", json=body(prompt="crash")).text)
                shown.append(web.post("/v1/completions", content=b"{" + key.encode()).text)
        callers = made.service.callers
        directory = callers._file.value
        shown += [repr(callers), repr(directory), repr(callers.config), repr(callers.of(f"Bearer {given[0]}"))]
        with pytest.raises(TurnoutError) as confused:
            callers.of("x" + given[0])
        shown.append(repr(confused.value))
        made.file.write_text(f"tenants: {{acme: {{keys: [{given[0]}]}}}}", encoding="utf-8")
        until(lambda: bool(callers.faults), 10)
        shown += callers.faults
        shown += [record.model_dump_json() for record in made.records()]
        hashes = [record.hash for _, record in directory.keys.values()]
    out, err = capfd.readouterr()
    everything = "\n".join([*shown, out, err, caplog.text])
    assert "acme" in everything  # it did look at something
    assert "unexpected" not in everything
    keys = [key.split("_", 2)[-1] for key in (*made.keys.values(), bad)]
    for secret in [*keys, forged.split(".")[2], good.split(".")[2], *hashes]:
        assert secret not in everything
