"""gRPC through Serve, with real channels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from ray import serve

from deployments.app import QUIET, RunningServer
from tests.deployments.conftest import assert_freed, poll, stats
from turnout.client import AsyncClient, Client, Stream
from turnout.errors import Code, TurnoutError
from turnout.proto import generation_pb2 as pb
from turnout.proto.generation_pb2_grpc import GenerationStub


@pytest.fixture
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc_address) as opened:
        yield opened


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with Client(server.grpc_address) as opened:
        yield opened


def test_generate_tells_which_model_wrote_what(client: Client) -> None:
    result = client.generate("hello", model="demo", max_tokens=4, params={"window": 3}, logprobs=2)
    assert result.text == "abcd"
    assert [token.source for token in result.tokens] == ["small", "large", "small", "large"]
    assert result.tokens[0].entropy_bits == 1.25
    assert len(result.tokens[0].top) == 2
    assert result.usage.params == {"window": 3}
    assert result.usage.cost.large_only.paper == 1.0


def test_a_stream_arrives_as_it_is_written(client: Client) -> None:
    with client.stream("slow", model="demo", max_tokens=3) as stream:
        chunks = list(stream)
    assert [chunk.text for chunk in chunks] == ["a", "b", "c"]
    assert stream.usage is not None
    assert stream.usage.completion_tokens == 3


def test_a_conversation_a_score_and_the_lists(client: Client) -> None:
    result = client.generate(messages=[{"role": "user", "content": "hi"}], model="demo", max_tokens=2)
    assert result.text == "ab"
    [scored] = client.score("ab", ["cd"], model="large")
    assert [token.logprob for token in scored.tokens] == [-0.5, -0.5]
    [one, other] = client.embed(["a", (1, 2)], model="large", pooling="last", dimensions=2, truncate_prompt_tokens=9)
    assert one == pytest.approx([math.cos(1), math.sin(1)])
    assert other == pytest.approx([math.cos(2), math.sin(2)])
    with pytest.raises(TurnoutError) as refused:
        client.embed(["a"], pooling="cls")  # type: ignore[arg-type]
    assert refused.value.field in ("pooling", "model")
    text = {"text": "ab", "window": 9, "overlap": 1}
    assert client.task("compress", text, model="demo", deadline_s=9.0) == {"params": text}
    assert [model.name for model in client.models()] == [
        *("demo", "small", "large", "narrow", "frail"),
        *("real", "real-small", "real-large"),
    ]
    methods = {method.name: method for method in client.methods()}
    assert methods["plain"].params_schema["type"] == "object"


async def test_the_async_client_does_the_same(server: RunningServer) -> None:
    async with AsyncClient(server.grpc_address) as client:
        assert (await client.generate("hello", model="demo", max_tokens=3)).text == "abc"
        async with client.stream("hello", model="demo", max_tokens=3) as stream:
            assert "".join([chunk.text async for chunk in stream]) == "abc"
        with pytest.raises(TurnoutError) as refusal:
            await client.generate("", model="demo")
        assert refusal.value.field == "prompt"
        assert len(await client.models()) == 8


@pytest.mark.parametrize(
    ("options", "code", "field"),
    [
        ({"prompt": ""}, Code.INVALID_ARGUMENT, "prompt"),
        ({"prompt": ()}, Code.INVALID_ARGUMENT, "prompt_ids"),
        ({"prompt": (1, 999)}, Code.OUT_OF_RANGE, "prompt_ids"),
        ({"prompt": "x" * 5000}, Code.OUT_OF_RANGE, "prompt"),
        ({"prompt": "x", "model": "nope"}, Code.NOT_FOUND, "model"),
        ({"prompt": "x", "model": ""}, Code.INVALID_ARGUMENT, "model"),
        ({"prompt": "x", "method": "nope"}, Code.NOT_FOUND, "method"),
        ({"prompt": "x", "params": {"nope": 1}}, Code.INVALID_ARGUMENT, "params.nope"),
        ({"prompt": "x", "temperature": -1.0}, Code.INVALID_ARGUMENT, "sampling.temperature"),
        ({"prompt": "x", "top_p": 0.0}, Code.INVALID_ARGUMENT, "sampling.top_p"),
        ({"prompt": "x", "max_tokens": 0}, Code.INVALID_ARGUMENT, "sampling.max_tokens"),
        ({"prompt": "x", "top_k": -5}, Code.INVALID_ARGUMENT, "sampling.top_k"),
        ({"prompt": "x", "deadline_s": -1.0}, Code.INVALID_ARGUMENT, "deadline_s"),
        ({"messages": [{"role": "robot", "content": "x"}]}, Code.INVALID_ARGUMENT, "chat.messages.0.role"),
        ({"messages": []}, Code.INVALID_ARGUMENT, "chat.messages"),
    ],
)
def test_bad_input_is_refused_and_the_server_goes_on(
    client: Client, server: RunningServer, options: dict[str, Any], code: Code, field: str
) -> None:
    options = {"model": "demo", **options}
    for attempt in (lambda: client.generate(**options), lambda: next(client.stream(**options))):
        with pytest.raises(TurnoutError) as refusal:
            attempt()
        assert (refusal.value.code, refusal.value.field) == (code, field)
        assert "Traceback" not in refusal.value.message
        assert "/" not in refusal.value.message
    assert stats(server).requests == 0


@pytest.mark.parametrize(
    ("method", "data"),
    [
        *(
            (method, data)
            for method in ("Generate", "Score")
            for data in (b"\xff\xff", b"\x0a\x02\xff\xfe", b"\x0a\x7fx")
        ),
        *((method, data) for method in ("ListModels", "ListMethods") for data in (b"\xff\xff", b"\x0a\x7fx")),
    ],
)
def test_bytes_that_are_no_message_are_refused(channel: grpc.Channel, method: str, data: bytes) -> None:
    with pytest.raises(grpc.RpcError) as refusal:
        channel.unary_unary(f"/turnout.v1.Generation/{method}")(data, timeout=10)
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "turnout.v1." in refusal.value.details()
    assert "Traceback" not in refusal.value.details()


def test_a_stream_of_bytes_that_are_no_message_is_refused(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as refusal:
        next(channel.unary_stream("/turnout.v1.Generation/StreamGenerate")(b"\x1a\x02\xff\xfe", timeout=10))
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.value.details().startswith("prompt: is no valid UTF-8")


def test_a_request_has_a_largest_size(client: Client) -> None:
    with pytest.raises(TurnoutError) as refusal:
        client.generate("x" * (33 << 20), model="demo")
    assert (refusal.value.code, refusal.value.field) == (Code.INVALID_ARGUMENT, "request")
    assert "33554432" in refusal.value.message


def test_far_too_large_a_message_is_refused_by_grpc_itself(client: Client) -> None:
    """Nobody's key has been looked at by then: what a proxy holds of it must be bounded."""
    with pytest.raises(TurnoutError, match=r"larger than max \(\d+ vs. 41943040\)") as refusal:
        client.generate("x" * 50_000_000, model="demo")
    assert refusal.value.code is Code.RESOURCE_EXHAUSTED


def test_our_faults_leak_nothing(client: Client) -> None:
    for attempt in (client.generate, lambda *a, **k: list(client.stream(*a, **k))):
        with pytest.raises(TurnoutError) as fault:
            attempt("crash", model="demo", request_id="my-id")
        assert fault.value.code is Code.INTERNAL
        assert fault.value.message == "internal error, request id my-id"


def test_leaving_a_stream_frees_everything(client: Client, server: RunningServer) -> None:
    with client.stream("slow", model="demo", max_tokens=1000) as stream:
        next(stream)
        assert stats(server).requests == 1
    assert_freed(server)


def test_closing_the_channel_frees_everything(server: RunningServer) -> None:
    client = Client(server.grpc_address)
    streams = [client.stream("slow", model="demo", max_tokens=1000) for _ in range(4)]
    for stream in streams:
        next(stream)
    assert stats(server).requests == 4
    client.close()
    assert_freed(server)


def test_cancelling_a_unary_call_frees_everything(channel: grpc.Channel, server: RunningServer) -> None:
    stub: Any = GenerationStub(channel)
    call = stub.Generate.future(pb.GenerateRequest(model="demo", prompt="wait"))
    poll(lambda: stats(server).requests == 1, "the call arrived")
    call.cancel()
    assert_freed(server)


def test_both_kinds_of_deadline_free_everything(channel: grpc.Channel, client: Client, server: RunningServer) -> None:
    with pytest.raises(TurnoutError) as late:
        client.generate("wait", model="demo", deadline_s=0.2)
    assert (late.value.code, late.value.field) == (Code.DEADLINE_EXCEEDED, "deadline_s")
    with pytest.raises(TurnoutError) as late:
        list(client.stream("slow", model="demo", max_tokens=1000, deadline_s=0.5))
    assert late.value.code is Code.DEADLINE_EXCEEDED
    stub: Any = GenerationStub(channel)
    with pytest.raises(grpc.RpcError) as expired:
        stub.Generate(pb.GenerateRequest(model="demo", prompt="wait"), timeout=0.3)
    assert expired.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert_freed(server)


def test_a_full_pool_refuses_and_recovers(client: Client, server: RunningServer) -> None:
    with client.stream("slow", model="narrow", max_tokens=1000) as running:
        next(running)
        waiting: list[Stream] = []
        refusals: list[TurnoutError] = []

        def refused() -> bool:
            # Calls may overtake each other: one of these takes the place before a probe with a deadline does.
            waiting.append(client.stream("slow", model="narrow", max_tokens=1000))
            try:
                client.generate("x", model="narrow", max_tokens=1, deadline_s=0.5)
            except TurnoutError as error:
                refusals.append(error)
            return bool(refusals) and refusals[-1].code is Code.RESOURCE_EXHAUSTED

        poll(refused, "the pool is full")
        assert "'narrow'" in refusals[-1].message
        assert refusals[-1].retry_after_s == 1.0
        assert client.generate("x", model="demo", max_tokens=1).text == "a"
        assert len(client.models()) == 8
        for stream in waiting:
            stream.close()
    assert_freed(server, "narrow")
    poll(lambda: client.generate("x", model="narrow", max_tokens=1).text == "a", "the pool takes requests again")


def test_reflection_describes_the_service(channel: grpc.Channel) -> None:
    reflection = ProtoReflectionDescriptorDatabase(channel)
    assert {"turnout.v1.Generation", "grpc.health.v1.Health"} <= set(reflection.get_services())


def test_the_standard_health_check(channel: grpc.Channel) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    for service in ("", "turnout.v1.Generation"):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as refusal:
        stub.Check(health_pb2.HealthCheckRequest(service="other"), timeout=10)
    assert refusal.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_proxy_that_does_not_know_whom_to_ask_is_asked_again(client: Client) -> None:
    """As one that was just started does not, and says NOT_FOUND; here it has two applications to choose from."""

    def code() -> Code | None:
        try:
            client.methods()
        except TurnoutError as refusal:
            return refusal.code
        return None

    serve.run(serve.deployment(object).bind(), name="other", route_prefix="/other", logging_config=QUIET)
    try:
        poll(lambda: code() is not None, "the proxy knows both")
        assert code() is Code.UNAVAILABLE
    finally:
        serve.delete("other")
    poll(lambda: code() is None, "the proxy knows one")


def test_a_call_that_ends_its_replica_twice_is_refused_and_the_pool_comes_back(client: Client) -> None:
    with pytest.raises(TurnoutError) as lost:
        list(client.stream("die", model="frail", max_tokens=10))
    assert lost.value.code is Code.INTERNAL
    assert "frail" in lost.value.message
    assert "not tried again" in lost.value.message

    def served() -> bool:
        try:
            return client.generate("x", model="frail", max_tokens=1, deadline_s=5.0).text == "a"
        except TurnoutError:
            return False

    poll(served, "the replica is back", timeout_s=60)
