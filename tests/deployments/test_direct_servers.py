"""The servers of an ingress that listens itself, two of them on one pair of ports, in this process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest

from deployments import app as application
from deployments.app import RunningServer, check_behind_proxies
from deployments.direct_servers import CancelledWithClient, DirectServers, _DirectServicer
from deployments.grpc_server import GrpcServicer
from deployments.http import build_http
from deployments.service import GenerationService
from tests.deployments.in_process import make_config, make_service
from tests.deployments.served_pool import until
from turnout.config import ServerConfig
from turnout.errors import Code, TurnoutError
from turnout.free_ports import free_port
from turnout.proto import generation_pb2 as pb
from turnout.proto.generation_pb2_grpc import GenerationStub


def ports(**changes: int) -> ServerConfig:
    return ServerConfig.model_validate({"grpc_port": free_port(), "http_port": free_port(), **changes})


def url(config: ServerConfig) -> str:
    return f"http://127.0.0.1:{config.http_port}"


@asynccontextmanager
async def listening(config: ServerConfig, service: GenerationService) -> AsyncIterator[DirectServers]:
    servicer = GrpcServicer()
    servicer.service = service
    servers = DirectServers(config, build_http(service), servicer)
    await servers.start()
    try:
        yield servers
    finally:
        await servers.stop(1.0)


async def requests_of(service: GenerationService) -> int:
    return sum(each.requests for stats in (await service.stats()).values() if isinstance(stats, list) for each in stats)


async def freed(service: GenerationService) -> None:
    async def none() -> bool:
        return await requests_of(service) == 0

    await until(none, "nothing runs")


BODY = {"model": "demo", "prompt": "hi", "max_tokens": 3}


async def test_two_processes_share_their_ports_and_the_second_answers_when_the_first_has_stopped() -> None:
    config, services = ports(), [make_service(), make_service()]
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(listening(config, each)) for each in services]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{config.grpc_port}") as channel:
            answer = await GenerationStub(channel).Generate(pb.GenerateRequest(model="demo", prompt="hi"))
            assert answer.choices[0].text
        await first.stop(1.0)
        for _ in range(4):
            async with httpx.AsyncClient(base_url=url(config)) as client:
                assert (await client.post("/v1/completions", json=BODY)).json()["choices"][0]["text"] == "abc"
        second.check()


async def test_a_server_that_ended_by_itself_fails_its_check() -> None:
    async with listening(ports(), make_service()) as servers:
        servers.check()
        assert servers._serving is not None
        servers._serving.cancel()
        await asyncio.gather(servers._serving, return_exceptions=True)
        with pytest.raises(RuntimeError, match="has ended"):
            servers.check()


async def test_what_runs_when_a_process_stops_is_answered_to_its_end() -> None:
    config, service = ports(), make_service()
    async with listening(config, service) as servers, httpx.AsyncClient(base_url=url(config)) as client:
        body = {**BODY, "prompt": "slow", "max_tokens": 4, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            stopping = asyncio.create_task(servers.stop(30.0))
            rest = [line async for line in lines]
        assert rest[-2:] == ["data: [DONE]", ""]
        await stopping
        with pytest.raises(httpx.ConnectError):
            await client.get("/version")


async def test_a_request_is_cancelled_when_its_client_leaves() -> None:
    config, service = ports(), make_service()
    async with listening(config, service), httpx.AsyncClient(base_url=url(config)) as client:
        for stream in (False, True):
            body = {**BODY, "prompt": "slow", "max_tokens": 1000, "stream": stream}
            asked = asyncio.create_task(client.post("/v1/completions", json=body, timeout=60))

            async def runs() -> bool:
                return await requests_of(service) == 1

            await until(runs, "the request runs")
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await freed(service)
    async with listening(config, service), grpc.aio.insecure_channel(f"127.0.0.1:{config.grpc_port}") as channel:
        request = pb.GenerateRequest(model="demo", prompt="slow", sampling=pb.Sampling(max_tokens=1000))
        messages = GenerationStub(channel).StreamGenerate(request)
        await messages.read()
        messages.cancel()
        await freed(service)
    assert await requests_of(service) == 0


async def test_an_answer_whose_client_does_not_read_is_cut_off() -> None:
    """Its deadline is none: that runs while the pool is waited for."""
    ended: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        finally:
            ended.append("http")

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await CancelledWithClient(app, 0.01)({"type": "http"}, never, never)

    class Servicer(GrpcServicer):
        async def StreamGenerate(self, data: bytes, grpc_context: Any) -> Any:
            try:
                yield data
            finally:
                ended.append("grpc")

    async def write() -> None:
        async for _ in _DirectServicer(Servicer(), 0.01).StreamGenerate(b"", None):
            await never()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(write())

    async def both() -> bool:
        return ended == ["http", "grpc"]

    await until(both, "both have ended")


async def test_a_refused_stream_has_its_code_and_nothing_of_our_inside() -> None:
    config = ports()
    async with (
        listening(config, make_service()),
        grpc.aio.insecure_channel(f"127.0.0.1:{config.grpc_port}") as channel,
    ):
        stub = GenerationStub(channel)
        for prompt, model, code, says in (
            ("hi", "nope", grpc.StatusCode.NOT_FOUND, "model: 'nope' is not known"),
            ("crash", "demo", grpc.StatusCode.INTERNAL, "internal error, request id r1"),
        ):
            request = pb.GenerateRequest(model=model, prompt=prompt, request_id="r1")
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                async for _ in stub.StreamGenerate(request):
                    pass
            assert refusal.value.code() is code
            assert refusal.value.details().startswith(says)
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await stub.Generate(request)
            assert refusal.value.code() is code


async def test_answers_name_their_request_and_probes_are_answered() -> None:
    config = ports()
    async with listening(config, make_service()), httpx.AsyncClient(base_url=url(config)) as client:
        assert (await client.get("/-/healthz")).text == "success"
        named = await client.post("/v1/completions", json=BODY, headers={"X-Request-Id": "mine"})
        assert (named.headers["x-request-id"], named.json()["id"]) == ("mine", "cmpl-mine")
        for headers in ({}, {"X-Request-Id": ""}):
            own = await client.post("/v1/completions", json=BODY, headers=headers)
            assert own.json()["id"] == f"cmpl-{own.headers['x-request-id']}"
            assert len(own.headers.get_list("x-request-id")) == 1


@pytest.mark.parametrize("field", ["http_port", "grpc_port"])
async def test_a_port_of_another_server_is_refused_by_name(field: str) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        config = ports(**{field: taken.getsockname()[1]})
        servers = DirectServers(config, build_http(make_service()), GrpcServicer())
        with pytest.raises(TurnoutError) as refusal:
            await servers.start()
    assert (refusal.value.code, refusal.value.field) == (Code.INVALID_ARGUMENT, f"server.{field}")


def test_only_a_local_run_may_listen_itself_and_only_from_its_start_on() -> None:
    config = make_config(ingress_processes=2)
    with pytest.raises(TurnoutError, match="must be 0 on a cluster") as refusal:
        check_behind_proxies(config)
    assert refusal.value.field == "server.ingress_processes"
    for running, wanted in ((None, config), (config.server, make_config())):
        with pytest.raises(TurnoutError, match="cannot change"):
            RunningServer("", "", ("demo",), listens=running).update(wanted)


def test_an_update_stays_at_the_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    deployed: list[ServerConfig] = []
    monkeypatch.setattr(application, "deploy", lambda config, _: deployed.append(config.server))
    at = ports(ingress_processes=1)
    wanted = make_config(ingress_processes=3, request_timeout_s=7.0)
    RunningServer("", "", ("demo",), listens=at).update(wanted)
    [found] = deployed
    assert (found.http_port, found.grpc_port) == (at.http_port, at.grpc_port)
    assert (found.ingress_processes, found.request_timeout_s) == (3, 7.0)
